#!/usr/bin/env bash
# A run that stops half-way and goes on, beside the quickstart's, which did not stop: every array has the same bits.
# Needs quickstart.sh.
source "$(dirname "${BASH_SOURCE[0]}")/places.sh"

quickstart resumed train.steps="$((STEPS / 2))"
quickstart resumed train.steps="$STEPS"
# What may differ is their names and what a clock measured: neither is an array.
difference="$(maxtext checkpoint diff "$RUNS/resumed" "$RUNS/quickstart")" || [ $? -eq 1 ]
if grep -E '^(params|optimizer|rng|step)\b' <<< "$difference"; then exit 1; fi
echo "every array has the same bits"
