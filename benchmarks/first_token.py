"""From typing `mainspring generate` to the first byte of its answer: the second run, the median of five."""

from mainspring.bench.startup import first_token_s, median_of

MODEL, KERNELS = "smollm2-135m", "auto"

if __name__ == "__main__":
    print(f"first token after {median_of(5, lambda: first_token_s(MODEL, KERNELS)):.2f} s")
