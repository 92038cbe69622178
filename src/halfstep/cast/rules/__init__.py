"""Rules: a policy compiled into the handler of each operator, and the dispatch that calls it."""
