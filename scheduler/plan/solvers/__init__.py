"""How packs are filled: solvers for free and minimal movement, and the exchanges that they share."""
