"""Fakes: a model, executors, a grammar, KV from elsewhere and a clock, to prove the core without a real
model.
"""
