"""Published models: families, what their configs say, where their arrays lie, and their blocks of 4 or 8 bits."""
