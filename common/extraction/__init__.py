"""03: preflight, batching, engine, self-check, runner, capture in the worker, writer."""
