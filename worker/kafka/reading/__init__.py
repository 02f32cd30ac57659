"""Reading: fetched batches become records, within the memory budget; what cannot be read becomes a fault."""
