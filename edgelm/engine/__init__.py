"""The engine: scheduler, KV bookkeeping and the step loop. Knows integers only."""
