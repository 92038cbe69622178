"""The audit: a few steps measured operator by operator, beside fp32."""
