"""The loop under `LLM`: add requests while others run, step, and abort one that nobody wants any more."""

from mainspring import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams


def main() -> None:
    args = EngineArgs(model="smollm2-135m", max_model_len=1024)
    params = SamplingParams(temperature=0, max_tokens=8, output_kind=RequestOutputKind.DELTA)
    with LLMEngine.from_engine_args(args) as engine:
        engine.add_request("first", "One, two, three,", params)
        engine.add_request("unwanted", "Once upon a time", params)
        step = 0
        while engine.has_unfinished_requests():
            step += 1
            if step == 3:
                engine.add_request("late", "Monday, Tuesday,", params)
                engine.abort_request("unwanted")
            for output in engine.step():
                print(f"step {step:2}  {output.request_id:<9}{output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
