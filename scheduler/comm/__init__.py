"""Between ranks: process groups, transports, agreement at the start, and who is alive."""
