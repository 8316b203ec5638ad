#!/bin/sh
# A durable Redis with a password: HEADRACE_REDIS_PASSWORD, else the one that the first start made.
set -eu
file=/secrets/redis_password
if [ -n "${HEADRACE_REDIS_PASSWORD:-}" ]; then
  printf '%s' "$HEADRACE_REDIS_PASSWORD" >"$file"
elif [ ! -s "$file" ]; then
  od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$file"
fi
hash=$(sha256sum "$file" | cut -d' ' -f1)
# What the processes of a run need, and no FLUSHALL, CONFIG, DEBUG, KEYS. In a file, because arguments can be read by all.
cat >/secrets/redis.conf <<CONF
user default on #$hash ~headrace:* resetchannels &headrace:* +@all -@dangerous +info
dir /data
appendonly yes
appendfsync always
maxmemory-policy noeviction
CONF
chmod 444 "$file" /secrets/redis.conf  # Only containers that mount the volume see it, each under a user of its own.
unset HEADRACE_REDIS_PASSWORD
exec docker-entrypoint.sh redis-server /secrets/redis.conf
