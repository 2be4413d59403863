"""`evenpack plan`, the pure parts: lengths in, simulated steps, figures and advice out."""
