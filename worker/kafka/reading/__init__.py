"""Reading: fetched batches become records, within the memory budget; unreadable data becomes a fault."""
