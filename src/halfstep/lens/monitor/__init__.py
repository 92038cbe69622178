"""The monitor: sketches of a long run, now and then, and what is wrong in them."""
