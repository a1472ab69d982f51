"""What /metrics says is what clients saw, over sockets, with a real core in its own process."""

from __future__ import annotations

import json
import threading
from functools import partial

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_toys import Running, fake, is_idle, open_fake, running, wait_until


def page(server: Running) -> dict[tuple[str, ...], float]:
    """By name, and the values of labels other than those of the engine, sorted by their names."""
    told = {}
    for family in text_string_to_metric_families(server.get("/metrics").body.decode()):
        for sample in family.samples:
            rest = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            told[sample.name, *(rest[name] for name in sorted(rest))] = sample.value
    return told


class Client(threading.Thread):
    """Asks for one stream; reads it to its end, or leaves after `num_events` of it."""

    def __init__(self, server: Running, num_events: int | None = None, **fields: object) -> None:
        super().__init__()
        self.server, self.num_events, self.fields = server, num_events, fields
        self.usage: dict = {}
        self.num_seen = 0
        self.start()

    def run(self) -> None:
        given = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, **self.fields}
        connection, response = self.server.send("POST", "/v1/completions", given)
        assert response.status == 200
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            self.usage = event.get("usage") or self.usage
            self.num_seen += sum(bool(choice["text"]) for choice in event["choices"])
            if self.num_events is not None and self.num_seen >= self.num_events:
                break
        response.close()
        connection.close()


def test_counts_are_what_clients_saw():
    """Case B169: streams of one and of three answers, preempted for want of blocks; readers that leave; bad
    requests. At the end every figure is a sum over what clients saw."""
    limits = {"num_gpu_blocks_override": 24, "max_model_len": 128, "max_num_batched_tokens": 64}
    # Steps take their time, or the first clients have all they want before the last one has asked.
    cramped = partial(open_fake, {"step_s": 0.005}, **limits)
    with running(cramped) as server:
        whole = [
            Client(server, prompt=[65 + i] * (10 + 3 * i), max_tokens=20 + i, n=1 + 2 * (i % 2), seed=i)
            for i in range(8)
        ]
        leaving = [Client(server, 3, prompt=[97 + i] * 9, max_tokens=100) for i in range(4)]
        refused = [server.complete([1], max_tokens=-1).status for _ in range(3)]
        for client in whole + leaving:
            client.join()
        wait_until(lambda: is_idle(server))
        told = page(server)
        assert refused == [400] * 3
        written = sum(client.usage["completion_tokens"] for client in whole)
        assert written == sum((20 + i) * (1 + 2 * (i % 2)) for i in range(8))
        read = sum(client.usage["prompt_tokens"] for client in whole) + 4 * 9
        assert told["vllm:prompt_tokens_total",] == read, "a prompt counts once, however many answers"
        at_least = sum(client.num_seen for client in leaving)
        assert at_least <= told["vllm:generation_tokens_total",] - written <= 4 * 100
        assert told["vllm:request_generation_tokens_sum",] == told["vllm:generation_tokens_total",]
        ends = {key[1]: value for key, value in told.items() if key[0] == "vllm:request_success_total"}
        assert ends == {"stop": 0, "length": 4 * 1 + 4 * 3, "abort": 4, "error": 0, "repetition": 0}
        assert told["vllm:request_params_n_count",] == 12
        assert told["vllm:time_to_first_token_seconds_count",] == 16 + 4
        assert told["vllm:num_preemptions_total",] > 0, "else this has not shown what it should"
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert told[f"vllm:{gauge}",] == 0
        assert told["http_requests_total", "/v1/completions", "POST", "4xx"] == 3
        answered = {
            status: value
            for (name, *labels), value in told.items()
            if name == "http_requests_total" and labels[0] == "/v1/completions"
            for status in labels[2:]
        }
        assert sum(answered.values()) == 15
        assert told["http_request_size_bytes_count", "/v1/completions"] == 15


def test_the_end_of_the_core_is_counted():
    """A core that fails under its streams: their ends are errors, nothing runs, and the page still comes."""
    with fake({"phase": "decode", "deed": "raise"}) as server:
        reply = server.complete([1, 2, 3], max_tokens=50, ignore_eos=True)
        assert reply.status >= 500
        told = page(server)
        assert told["vllm:request_success_total", "error"] == 1
        assert told["vllm:num_requests_running",] == told["vllm:kv_cache_usage_perc",] == 0


@pytest.mark.parametrize("path", ["/metrics", "/health", "/version"])
def test_what_machines_ask_is_not_recorded(path):
    with fake() as server:
        server.get(path)
        server.get("/nothing/at/all")
        handlers = {key[1] for key in page(server) if key[0] == "http_requests_total"}
        assert path not in handlers
        assert handlers == {"none"}, "of unknown paths one label"


def test_the_page_needs_no_key_and_names_its_format():
    with fake(api_key=["secret"]) as server:
        reply = server.get("/metrics")
        assert reply.status == 200
        assert reply.headers["content-type"].startswith("text/plain; version=")
