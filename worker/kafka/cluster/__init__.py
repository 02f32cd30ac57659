"""The cluster: connections, its topics and what is wrong with them, its errors in words."""
