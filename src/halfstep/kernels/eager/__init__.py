"""The backend of torch's own operators: any device, no compiler."""
