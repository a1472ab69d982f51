"""llama.cpp through the low-level interface of llama-cpp-python, compiled for this machine's instructions.

All requests of a round are sequences of one context, as in llama.cpp's own batched benchmark: the prompts are
read in batches of `N_BATCH` tokens, then each step decodes one token of every sequence. The contexts are made
as llama.h advises: one KV buffer per sequence (`kv_unified` off), except where prompts have a common
beginning, which is then read once and given to all sequences (`llama_memory_seq_cp`).
"""

import ctypes
import itertools
import re
import time

import llama_cpp as lib
import numpy as np
from answering import Done, Load, Loaded, Run, answer_orders

N_BATCH, N_UBATCH = 2048, 512  # llama.cpp's own defaults
SEQUENCE_PAD = 256  # a sequence's share of the context is a multiple of it


class LlamaCpp:
    def load(self, load: Load) -> Loaded:
        lib.llama_backend_init()
        model = lib.llama_model_load_from_file(load.model.encode(), lib.llama_model_default_params())
        if model is None:
            raise RuntimeError(f"{load.model} cannot be loaded")
        self._model = model
        self._num_threads = load.num_threads
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._n_ubatch = load.settings.get("n_ubatch", N_UBATCH)
        self._contexts: dict[tuple[int, int, bool], int] = {}
        settings = {
            "n_threads": load.num_threads,
            "n_threads_batch": load.num_threads,
            "n_batch": N_BATCH,
            "n_ubatch": self._n_ubatch,
            "kv_unified": "only for common prompts",
            "compiled for": compiled_for(),
        }
        return Loaded(lib.__version__, settings)

    def run(self, run: Run) -> Done:
        longest = max(map(len, run.prompts)) + run.num_output_tokens
        context = self._context(len(run.prompts), longest, unified=run.num_common_tokens > 0)
        memory = lib.llama_get_memory(context)
        lib.llama_memory_clear(memory, False)
        start = time.perf_counter()
        outputs = self._generate(context, memory, run)
        return Done(time.perf_counter() - start, outputs)

    def _context(self, num_sequences: int, length: int, unified: bool) -> int:
        """Made once for each shape: that is set-up, and not measured."""
        length = -(-length // SEQUENCE_PAD) * SEQUENCE_PAD
        key = (num_sequences, length, unified)
        if key not in self._contexts:
            params = lib.llama_context_default_params()
            params.n_ctx = num_sequences * length
            params.n_seq_max = num_sequences
            params.n_batch, params.n_ubatch = N_BATCH, self._n_ubatch
            params.n_threads = params.n_threads_batch = self._num_threads
            params.kv_unified = unified
            context = lib.llama_init_from_model(self._model, params)
            if context is None:
                raise RuntimeError(f"no context for {num_sequences} sequences of {length} tokens")
            self._contexts[key] = context
        return self._contexts[key]

    def _generate(self, context: int, memory: int, run: Run) -> list[list[int]]:
        common = run.num_common_tokens
        sequences = range(len(run.prompts))
        if common:
            self._decode(context, [(token, i, 0) for i, token in enumerate(run.prompts[0][:common])], set())
            for sequence in sequences[1:]:
                lib.llama_memory_seq_cp(memory, 0, sequence, 0, common)
        entries = [
            (prompt[i], i, sequence)
            for sequence, prompt in enumerate(run.prompts)
            for i in range(common, len(prompt))
        ]
        ends = {index - 1 for index in itertools.accumulate(len(prompt) - common for prompt in run.prompts)}
        tokens = self._decode(context, entries, ends)
        outputs = [[token] for token in tokens]
        for step in range(run.num_output_tokens - 1):
            entries = [(outputs[s][-1], len(run.prompts[s]) + step, s) for s in sequences]
            for output, token in zip(outputs, self._decode(context, entries, set(sequences)), strict=True):
                output.append(token)
        return outputs

    def _decode(self, context: int, entries: list[tuple[int, int, int]], wanted: set[int]) -> list[int]:
        """Compute (token, position, sequence) entries, in batches; the likeliest next tokens after those with
        an index in `wanted`."""
        chosen: list[int] = []
        for first in range(0, len(entries), N_BATCH):
            part = entries[first : first + N_BATCH]
            count = len(part)
            columns = np.array(part, np.int32).T.copy()
            wants = np.array([first + i in wanted for i in range(count)], np.int8)
            ones = np.ones(count, np.int32)
            addresses = columns[2].ctypes.data + 4 * np.arange(count, dtype=np.uint64)
            batch = lib.llama_batch(
                n_tokens=count,
                token=columns[0].ctypes.data_as(ctypes.POINTER(lib.llama_token)),
                pos=columns[1].ctypes.data_as(ctypes.POINTER(lib.llama_pos)),
                n_seq_id=ones.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
                seq_id=addresses.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(lib.llama_seq_id))),
                logits=wants.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
            )
            if status := lib.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode says {status}")
            if num_wanted := int(wants.sum()):
                logits = np.ctypeslib.as_array(lib.llama_get_logits(context), (num_wanted, self._vocab_size))
                chosen += logits.argmax(axis=1).tolist()
        return chosen


def compiled_for() -> str:
    """Names of the instruction sets that the library was compiled with."""
    named = re.findall(r"(\w+) = 1\b", lib.llama_print_system_info().decode())
    return " ".join(named)


if __name__ == "__main__":
    answer_orders(LlamaCpp())
