"""Makes `tests/data/encoders/pooled_texts.json`: what transformers says of the tiny encoder's texts.

    python tests/frontend/make_pooled_texts.py

Needs torch, transformers, tokenizers and safetensors (made with torch 2.13.0 and transformers 5.24.0): use an
environment of their own. Pooled as sentence-transformers does, in float32, each text alone.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from tiny_encoder import TEXTS, write_encoder
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

PAIRS = [(TEXTS[0], text) for text in TEXTS[1:]] + [(TEXTS[3], TEXTS[5])]
PLACE = Path(__file__).parents[1] / "data" / "encoders" / "pooled_texts.json"


def rounded(values: torch.Tensor) -> list[float]:
    return [round(float(value), 6) for value in values]


def main() -> None:
    found: dict[str, object] = {"texts": TEXTS, "pairs": PAIRS}
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        folder = write_encoder(Path(place) / "encoder")
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        model = AutoModel.from_pretrained(folder).eval()
        states = [
            model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0]
            for text in TEXTS
        ]
        found["mean"] = [rounded(each.mean(0)) for each in states]
        found["cls"] = [rounded(each[0]) for each in states]
        found["last"] = [rounded(each[-1]) for each in states]
        for name, labels in (("scores", ("yes",)), ("probs", ("sad", "glad", "neither"))):
            folder = write_encoder(Path(place) / name, labels=labels)
            model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
            asked = PAIRS if name == "scores" else [(text,) for text in TEXTS]
            logits = []
            for texts in asked:
                ids = tokenizer(*texts, return_token_type_ids=True, return_tensors="pt")
                logits.append(
                    model(input_ids=ids["input_ids"], token_type_ids=ids["token_type_ids"]).logits[0]
                )
            found[name] = [
                rounded(torch.sigmoid(each) if len(labels) == 1 else torch.softmax(each, 0))
                for each in logits
            ]
    PLACE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
