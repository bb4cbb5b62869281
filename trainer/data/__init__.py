"""Token ids from disk to micro-batches; numpy only, knows no device."""
