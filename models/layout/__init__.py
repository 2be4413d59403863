"""Where the media items of a sample stand in its tokens, and the positions that follow from that."""
