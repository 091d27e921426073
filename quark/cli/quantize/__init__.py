"""`quark quantize`: flags, request, configuration, plan and job."""
