"""Commands for people: benchmarks, a roofline, and a demonstration."""
