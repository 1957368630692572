"""The three GEMMs of a layer, of all rows or of groups of rows, in the formats of a recipe."""
