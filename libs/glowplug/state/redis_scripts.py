"""What Redis (or Valkey) does in one step: epochs, leases, and writes that an old leader may no longer make.

A lease is a hash {holder, epoch, url} that expires; beside it stands the counter of epochs, which does not.
"""

PREFIX = "glowplug:v1"  # of every key

NEXT_EPOCH = """
local next = math.max(tonumber(redis.call('get', KEYS[1]) or '0') + 1, tonumber(ARGV[1]))
redis.call('set', KEYS[1], string.format('%.0f', next))
return next
"""

# The answer of every lease script: holder, its epoch, its url, ms left, newest epoch.
_SEEN = """
local function seen()
  local lease = redis.call('hmget', KEYS[1], 'holder', 'epoch', 'url')
  local left, newest = redis.call("pttl", KEYS[1]), redis.call("get", KEYS[2])
  return {lease[1] or "", lease[2] or "0", lease[3] or "", left, newest or "0"}
end
local function hold(holder, url, ms, epoch)
  redis.call('set', KEYS[2], epoch)
  redis.call('hset', KEYS[1], 'holder', holder, 'epoch', epoch, 'url', url)
  redis.call('pexpire', KEYS[1], ms)
  return seen()
end
local holder = redis.call('hget', KEYS[1], 'holder')
local newest = tonumber(redis.call('get', KEYS[2]) or '0')
"""

# ARGV: highest epoch known to the caller
SEE = f"""{_SEEN}
if holder and newest < tonumber(ARGV[1]) then redis.call('set', KEYS[2], ARGV[1]) end
return seen()
"""

# ARGV: holder, url, ms, floor
TAKE = f"""{_SEEN}
if holder and holder ~= ARGV[1] then return seen() end
return hold(ARGV[1], ARGV[2], ARGV[3], string.format('%.0f', math.max(newest + 1, tonumber(ARGV[4]))))
"""

# ARGV: holder, url, ms, epoch
KEEP = f"""{_SEEN}
if newest > tonumber(ARGV[4]) or (holder and holder ~= ARGV[1]) then return seen() end
return hold(ARGV[1], ARGV[2], ARGV[3], ARGV[4])
"""

# ARGV: holder
DROP = f"""{_SEEN}
if holder == ARGV[1] then redis.call('del', KEYS[1]) end
return seen()
"""

FENCED = "GLOWPLUG-FENCED"
# KEYS: counter of epochs, key. ARGV: our epoch, command, its words
FENCED_WRITE = f"""
if tonumber(redis.call('get', KEYS[1]) or '0') > tonumber(ARGV[1]) then
  return redis.error_reply('{FENCED} a newer epoch has been given')
end
return redis.call(ARGV[2], KEYS[2], unpack(ARGV, 3))
"""
