"""What all designs share: norms, rotary positions, attention, SwiGLU, and the language model that walks the depth state."""
