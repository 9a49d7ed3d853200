"""The engine: scheduler, KV cache bookkeeping and the step loop. Knows integers only."""
