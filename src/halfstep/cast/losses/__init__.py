"""Losses that read low logits and sum in fp32."""
