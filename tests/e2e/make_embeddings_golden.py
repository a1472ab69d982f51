"""Makes `tests/data/minilm_embeddings.json`: embeddings of 200 texts by all-MiniLM-L6-v2, computed by
transformers.

    python tests/e2e/make_embeddings_golden.py FOLDER

Needs torch and transformers (made with 2.13.0 and 5.24.0): use an environment of their own. What is computed
is what the sentence-transformers package computes with this model, in float32: hidden states of the last
layer, their mean over the tokens of a text, divided by its length; each text alone, so that nothing is
padded. Texts are shorter than the 256 tokens at which that package cuts. Vectors are kept as float16.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

TOPICS = {
    "weather": "rain snow wind storm sunshine fog cold heat forecast umbrella",
    "cooking": "oven bread butter soup recipe onion garlic kitchen taste dinner",
    "science": "atom energy planet experiment theory microscope cell gravity light particle",
    "money": "bank loan market price salary tax budget invoice profit share",
    "music": "piano melody rhythm concert singer guitar orchestra song album chorus",
    "travel": "train passport harbour ticket mountain hotel luggage border island map",
    "computers": "compiler memory kernel thread cache socket pointer matrix token queue",
}
LINKS = "the a near with without under and of because after before while although for very"
FIXED = [
    "Hello",
    "hello",
    "HELLO, WORLD!",
    "That is a happy person",
    "That is a very happy dog",
    "Today is a sunny day",
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "def add(a, b):\n    return a + b",
    "SELECT name FROM users WHERE id = 42;",
    "e = mc^2, and 3.14159 is close to pi",
    "https://example.org/a/b?c=d#e",
    "Die Hauptstadt von Frankreich ist Paris.",
    "La photosynthèse est un processus naïf à façon.",
    "日本の首都は東京です。",
    "Привет, как дела?",
    "مرحبا بالعالم",
    "😀 🎉 emoji are unknown here",
    "a",
    ".",
    "   leading and trailing spaces   ",
    "tabs\tand\nlines\r\n",
    "Supercalifragilisticexpialidocious antidisestablishmentarianism",
]


def texts() -> list[str]:
    """Fixed ones, and more out of words of a topic, from 2 to some 180 words long."""
    chance, made = random.Random(6), list(FIXED)
    while len(made) < 200:
        words = TOPICS[chance.choice(sorted(TOPICS))].split()
        length = int(2 * 1.045 ** chance.randrange(100))
        picked = [chance.choice(words if i % 2 else LINKS.split()) for i in range(length)]
        made.append(" ".join(picked).capitalize() + chance.choice(".!?"))
    return made


def main(folder: str) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    found = []
    with torch.no_grad():
        for text in texts():
            hidden = model(**tokenizer(text, return_tensors="pt", padding=False)).last_hidden_state[0]
            assert len(hidden) <= 256, f"{len(hidden)} tokens"
            found.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
    vectors = np.array(found, np.float32).astype("<f2")
    path = Path(__file__).parents[1] / "data" / "minilm_embeddings.json"
    shape = f"little-endian float16 [{len(vectors)}, {vectors.shape[1]}], base64"
    content = {
        "made_by": "make_embeddings_golden.py",
        "shape": shape,
        "texts": texts(),
        "vectors": base64.b64encode(vectors.tobytes()).decode(),
    }
    path.write_text(json.dumps(content, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
