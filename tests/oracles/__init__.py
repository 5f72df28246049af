"""What the product computes, written again from the formulas as loops over single tokens and heads. Shares no code with the product."""
