"""Attention and recurrent layers that keep the segments of a row apart."""
