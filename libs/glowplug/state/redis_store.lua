-- What the server does in one step: epochs, leases, and writes that an old leader may no longer make. A lease is a hash
-- {holder, epoch, url} that expires; beside it stands the counter of epochs, which does not.
-- Each script begins with a line `-- script`, its name, and the part above it that it is written with; redis_store.py
-- reads them.

-- script epoch
-- An epoch as the store has it. What is no epoch, or more than a number of Lua holds exactly, counts as none: the next
-- one is taken from the clock, which is past every one that was ever given.
local function epoch_of(text)
  local epoch = type(text) == 'string' and tonumber(text)
  if not epoch or epoch ~= epoch or epoch < 0 or epoch >= 2^53 or epoch % 1 ~= 0 then return 0 end
  return epoch
end
local function epoch_at(key) return epoch_of(redis.pcall('get', key)) end

-- script next_epoch epoch
-- KEYS: counter of epochs. ARGV: floor
local next = math.max(epoch_at(KEYS[1]) + 1, tonumber(ARGV[1]))
redis.call('set', KEYS[1], string.format('%.0f', next))
return next

-- script fenced_write epoch
-- KEYS: counter of epochs, key. ARGV: our epoch, command, its words
if epoch_at(KEYS[1]) > tonumber(ARGV[1]) then
  return redis.error_reply('GLOWPLUG-FENCED a newer epoch has been given')
end
return redis.call(ARGV[2], KEYS[2], unpack(ARGV, 3))

-- script lease epoch
-- KEYS: lease, counter of epochs. The answer of every script below: holder, its epoch, its url, ms left, newest epoch.
-- What stands at the lease and is none (another type, no holder, no end, or one far away) goes first: nobody could lead
-- again.
local LONGEST_MS = 3600000 -- far above every GLOWPLUG_LEADER_LEASE_S in use, which is seconds
local function whole(number) return string.format('%.0f', number) end
local function seen()
  local lease = redis.call('hmget', KEYS[1], 'holder', 'epoch', 'url')
  local left = redis.call('pttl', KEYS[1])
  return {lease[1] or '', whole(epoch_of(lease[2])), lease[3] or '', left, whole(epoch_at(KEYS[2]))}
end
local function hold(holder, url, ms, epoch)
  redis.call('set', KEYS[2], epoch)
  redis.call('hset', KEYS[1], 'holder', holder, 'epoch', epoch, 'url', url)
  redis.call('pexpire', KEYS[1], ms)
  return seen()
end
local holder = redis.pcall('hget', KEYS[1], 'holder')
local left = redis.call('pttl', KEYS[1])
if type(holder) ~= 'string' or left < 0 or left > LONGEST_MS then
  redis.call('del', KEYS[1])
  holder = false
end
local newest = epoch_at(KEYS[2])

-- script see lease
-- ARGV: highest epoch known to the caller
if holder and newest < tonumber(ARGV[1]) then redis.call('set', KEYS[2], ARGV[1]) end
return seen()

-- script take lease
-- ARGV: holder, url, ms, floor
if holder and holder ~= ARGV[1] then return seen() end
return hold(ARGV[1], ARGV[2], ARGV[3], string.format('%.0f', math.max(newest + 1, tonumber(ARGV[4]))))

-- script keep lease
-- ARGV: holder, url, ms, epoch
if newest > tonumber(ARGV[4]) or (holder and holder ~= ARGV[1]) then return seen() end
return hold(ARGV[1], ARGV[2], ARGV[3], ARGV[4])

-- script drop lease
-- ARGV: holder
if holder == ARGV[1] then redis.call('del', KEYS[1]) end
return seen()

-- script table
-- KEYS: a hash. Its keys and values in turn: the lengths of all, joined by commas, and all of them in one string, since
-- a client reads two strings in a fraction of the time that it takes for thousands.
local parts = redis.call('hgetall', KEYS[1])
local lengths = {}
for i, part in ipairs(parts) do lengths[i] = #part end
return {table.concat(lengths, ','), table.concat(parts)}
