"""The parts of benchmarks/peers.py, a comparison of engines; `runners/` is what runs inside them."""
