"""The embedded engine: an OpenAI-compatible server over transformers, small enough for a laptop.

How one decode step works, from the outside in:

* `server` speaks HTTP, `chat` turns a body into prompt ids, `answers` turns sampled tokens into JSON.
* `scheduler` owns the one thread that touches the model. Requests join and leave between two steps.
* `runner` puts all tokens of a step, prompts and answers alike, in one flat row through transformers' own forward.
* `attention` gives each of these tokens what it may see: shared prefixes from `prefix` (a tree, each node computed
  once and read once for all who share it), and what is its own from `arena` (answers, in buckets of length).
"""
