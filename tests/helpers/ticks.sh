#!/bin/sh
# Runs a command that may say nothing for minutes, and prints a line every 10 seconds until it ends.
began=$(date +%s)
# sleep holds no pipe of ours, so that whoever reads them does not wait for it.
while sleep 10 > /dev/null 2>&1; do echo "... $(($(date +%s) - began)) s" >&2; done &
ticks=$!
trap 'kill $ticks 2> /dev/null' EXIT
"$@"
