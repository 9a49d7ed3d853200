"""What runs a model: each executor owns weights, KV memory and a device."""
