"""The audit: a few steps looked at operator by operator, beside fp32."""
