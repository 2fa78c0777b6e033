#!/bin/bash
# libgradsync.so shows the functions of gradsync.h and nothing else.
set -euo pipefail

library=$1
header=client/include/gradsync/gradsync.h

shown=$(nm -D --defined-only "$library" | awk '{print $3}' | sort)
# Inline functions are the program's own.
declared=$(grep -v '^static inline' "$header" | grep -oE '\bgradsync_[a-z_]+\(' | tr -d '(' | sort -u)

if [[ $shown != "$declared" ]]; then
  echo "exported symbols (>) differ from those that gradsync.h declares (<):"
  diff <(echo "$declared") <(echo "$shown")
  exit 1
fi

# Only the variant without TLS: the other would bring OpenSSL into every trainer.
if readelf -d "$library" | grep -E 'NEEDED.*(libgrpc\+\+\.so|libgrpc\.so|libssl|libcrypto)'; then
  echo "it needs gRPC with TLS"
  exit 1
fi
