"""The verifier's side of a round, inside SGLang's scheduler process."""
