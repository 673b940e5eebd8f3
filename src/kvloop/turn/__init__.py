"""One turn from request to receipt: the orchestration of plan, P leg and D leg, and only that."""
