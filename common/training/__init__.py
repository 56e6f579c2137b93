"""04: inputs, packing, loader, step, held-out measure, ranks, optimizers, metrics."""
