"""Makes `tests/data/gemma3_270m_greedy.json`: greedy continuations of Gemma 3 270M, computed by transformers.

    python tests/e2e/make_gemma3_golden.py gemma-3-270m-q4_k_m.gguf TEXT_FILE

Needs torch, transformers and gguf (made with 2.13.0, 5.24.0 and 0.19.0): use an environment of its own. The
weights are those of the GGUF file, dequantised by the gguf package, in float32. TEXT_FILE is what the long
prompt is made of: any English text of 10,000 characters (it was `docs/design.md`). A continuation is found
with a cache of keys, and all figures are then computed again for the whole text at once.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Water boils at a temperature of",
    "Q: What is the largest planet of the solar system?\nA:",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8, 13,",
    "To make a good cup of tea, first",
    "La photosynthèse est le processus par lequel",
    '{"name": "Ada", "born": 1815, "field":',
    "Dear Sir or Madam,\n\nI am writing to",
    "日本の首都は",
    "In mathematics, a prime number is",
    "SELECT name, age FROM",
]
BOS, EOS, NUM_NEW, LONG = 2, 1, 32, 1500
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def network(reader: GGUFReader) -> Any:
    config = Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        max_position_embeddings=32_768,
        sliding_window=512,
        layer_types=["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(18)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        attn_implementation="eager",
        tie_word_embeddings=True,
    )
    model = Gemma3ForCausalLM(config).float().eval()
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        tensors[hf_name(tensor.name)] = torch.from_numpy(values - 1.0 if "norm" in tensor.name else values)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert missing == ["lm_head.weight"], missing
    model.tie_weights()
    return model


def hf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("blk."):
        _, layer, rest = stem.split(".")
        return f"model.layers.{layer}.{NAMES[rest]}.weight"
    return {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[stem] + ".weight"


class Vocabulary:
    """SentencePiece's merging: the best pair first."""

    def __init__(self, reader: GGUFReader) -> None:
        tokens = reader.fields["tokenizer.ggml.tokens"].contents()
        scores = reader.fields["tokenizer.ggml.scores"].contents()
        self.tokens = tokens
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.scores = scores

    def encode(self, text: str) -> list[int]:
        parts = list(text.replace(" ", "\u2581"))
        while True:
            pairs = [
                (self.scores[self.ids[a + b]], -i)
                for i, (a, b) in enumerate(itertools.pairwise(parts))
                if a + b in self.ids
            ]
            if not pairs:
                return [self.ids[part] for part in parts]
            at = -max(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.tokens[i] for i in ids).replace("\u2581", " ")


def case(model: Any, vocabulary: Vocabulary, prompt: list[int]) -> dict[str, Any]:
    with torch.no_grad():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )[0]
        greedy = ids[len(prompt) :].tolist()
        logits = model(ids[None, :-1], use_cache=False, logits_to_keep=len(greedy)).logits[0]
    log_probs = torch.log_softmax(logits.double(), dim=-1)
    best = log_probs.topk(5, dim=-1)
    found = {
        "prompt_ids": prompt,
        "greedy_ids": greedy,
        "top2_gap": [round(float(row[0] - row[1]), 5) for row in best.values],
        "top5_logprobs": [
            [[int(i), round(float(value), 5)] for i, value in zip(rows, values, strict=True)]
            for rows, values in zip(best.indices, best.values, strict=True)
        ],
        "text": vocabulary.decode(greedy),
    }
    for token, row in zip(greedy, found["top5_logprobs"], strict=True):
        assert token == row[0][0] or row[0][1] - row[1][1] < 1e-4
    return found


def main(file: str, text: str) -> None:
    torch.set_num_threads(1)
    reader = GGUFReader(file)
    vocabulary = Vocabulary(reader)
    model = network(reader)
    cases = []
    for prompt in PROMPTS:
        cases.append({"prompt": prompt} | case(model, vocabulary, [BOS, *vocabulary.encode(prompt)]))
        print(repr(prompt), repr(cases[-1]["text"]), min(cases[-1]["top2_gap"]), flush=True)
    lines = Path(text).read_text().splitlines(keepends=True)
    ids = [BOS] + [i for line in lines for i in vocabulary.encode(line)]
    assert len(ids) >= LONG
    cases.append({"prompt": None} | case(model, vocabulary, ids[:LONG]))
    print("long", repr(cases[-1]["text"]), min(cases[-1]["top2_gap"]), flush=True)
    golden = {
        "about": "Greedy continuations of Gemma 3 270M (base), Q4_K_M, weights dequantised to float32, "
        "computed by transformers in float32 on CPU (make_gemma3_golden.py). The last prompt, of 1,500 "
        "tokens, passes the window of 512. top2_gap[i] is the gap between the best and second best token at "
        "step i; top5_logprobs[i] lists [token id, log-probability]. A continuation ends after 32 tokens or "
        "after token 1.",
        "raw": cases,
    }
    out = Path(__file__).parents[1] / "data" / "gemma3_270m_greedy.json"
    out.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
