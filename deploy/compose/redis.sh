#!/bin/sh
# A durable Redis with a password: HEADRACE_REDIS_PASSWORD, else the one that the first start made.
set -eu
file=/secrets/redis_password
if [ -n "${HEADRACE_REDIS_PASSWORD:-}" ]; then
  printf '%s' "$HEADRACE_REDIS_PASSWORD" >"$file"
elif [ ! -s "$file" ]; then
  od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$file"
fi
escaped=$(od -An -v -tx1 "$file" | tr -d '\n' | sed 's/ /\\x/g')  # Every byte, so that none has a meaning in the file.
# In a file, because the arguments of a process can be read by all.
cat >/secrets/redis.conf <<CONF
requirepass "$escaped"
dir /data
appendonly yes
appendfsync everysec
maxmemory-policy noeviction
CONF
chmod 444 "$file" /secrets/redis.conf  # Only containers that mount the volume see it, each under a user of its own.
unset HEADRACE_REDIS_PASSWORD
exec docker-entrypoint.sh redis-server /secrets/redis.conf
