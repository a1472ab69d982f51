"""What a tokenizer is made of, and how it is read from each form of model file.

`parts.py` has the nouns; `spelling.py` says what bytes a token stands for; `pre_tokenizers.py`,
`sentencepiece.py` and `library.py` turn text into ids; `from_gguf.py`, `from_folder.py` and
`sentencepiece_model.py` read files. `frontend/tokenizer.py` is what others use.
"""
