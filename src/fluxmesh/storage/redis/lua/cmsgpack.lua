-- MessagePack for a Lua that has no cmsgpack of its own (the server in this process). It does what the scripts ask
-- of the server's: pack and unpack one value, unpack_one from an offset. Numbers are doubles, exact below 2^53.
local cmsgpack = {}

local function big_endian(n, bytes)
  local out = {}
  for i = bytes, 1, -1 do
    out[i] = string.char(n % 256)
    n = math.floor(n / 256)
  end
  return table.concat(out)
end

local function pack_number(n)
  if n ~= math.floor(n) or n ~= n or n == math.huge or n == -math.huge then
    error('only whole numbers are packed here')
  elseif n >= 0 then
    if n < 128 then
      return string.char(n)
    elseif n < 4294967296 then
      return '\206' .. big_endian(n, 4)
    end
    return '\207' .. big_endian(n, 8)
  elseif n >= -32 then
    return string.char(n + 256)
  end
  local high, low = math.floor(n / 4294967296), n % 4294967296
  return '\211' .. big_endian(high + 4294967296, 4) .. big_endian(low, 4)
end

local function pack_head(n, small, most_small, wide)
  if n <= most_small then
    return string.char(small + n)
  end
  return wide .. big_endian(n, 4)
end

function cmsgpack.pack(value)
  local kind = type(value)
  if kind == 'string' then
    return pack_head(#value, 160, 31, '\219') .. value
  elseif kind == 'number' then
    return pack_number(value)
  elseif kind == 'boolean' then
    return value and '\195' or '\194'
  elseif kind == 'table' then
    local out = {pack_head(#value, 144, 15, '\221')}
    for i = 1, #value do
      out[i + 1] = cmsgpack.pack(value[i])
    end
    return table.concat(out)
  end
  return '\192'
end

local function number_at(blob, at, bytes)
  if at + bytes - 1 > #blob then
    error('the bytes end too early')
  end
  local n = 0
  for i = at, at + bytes - 1 do
    n = n * 256 + string.byte(blob, i)
  end
  return n, at + bytes
end

local function double_at(blob, at)
  local high, low = number_at(blob, at, 4), number_at(blob, at + 4, 4)
  local sign = high >= 2147483648 and -1 or 1
  local exponent = math.floor(high / 1048576) % 2048
  local fraction = (high % 1048576) * 4294967296 + low
  if exponent == 0 then
    return sign * math.ldexp(fraction, -1074), at + 8
  elseif exponent == 2047 then
    return fraction == 0 and sign * math.huge or 0 / 0, at + 8
  end
  return sign * math.ldexp(fraction + 4503599627370496, exponent - 1075), at + 8
end

local value_at

local function text_at(blob, at, size)
  if at + size - 1 > #blob then
    error('the bytes end too early')
  end
  return string.sub(blob, at, at + size - 1), at + size
end

local function array_at(blob, at, size)
  local list = {}
  for i = 1, size do
    list[i], at = value_at(blob, at)
  end
  return list, at
end

local function map_at(blob, at, size)
  local map, key, value = {}
  for _ = 1, size do
    key, at = value_at(blob, at)
    value, at = value_at(blob, at)
    if key == nil then
      error('a key is nil')
    end
    map[key] = value
  end
  return map, at
end

local CONSTANTS = {[192] = {nil}, [194] = {false}, [195] = {true}}
local UNSIGNED = {[204] = 1, [205] = 2, [206] = 4, [207] = 8}
local SIGNED = {[208] = 1, [209] = 2, [210] = 4, [211] = 8}
local TEXTS = {[196] = 1, [197] = 2, [198] = 4, [217] = 1, [218] = 2, [219] = 4}
local ARRAYS = {[220] = 2, [221] = 4}
local MAPS = {[222] = 2, [223] = 4}

local function wide_at(blob, at, code)
  local size
  if UNSIGNED[code] then
    return number_at(blob, at, UNSIGNED[code])
  elseif SIGNED[code] then
    local bytes = SIGNED[code]
    local n, after = number_at(blob, at, bytes)
    return n >= 2 ^ (8 * bytes - 1) and n - 2 ^ (8 * bytes) or n, after
  elseif TEXTS[code] then
    size, at = number_at(blob, at, TEXTS[code])
    return text_at(blob, at, size)
  elseif ARRAYS[code] then
    size, at = number_at(blob, at, ARRAYS[code])
    return array_at(blob, at, size)
  elseif MAPS[code] then
    size, at = number_at(blob, at, MAPS[code])
    return map_at(blob, at, size)
  elseif code == 203 then
    return double_at(blob, at)
  end
  error('byte ' .. code .. ' begins nothing that is read here')
end

function value_at(blob, at)
  local code
  code, at = number_at(blob, at, 1)
  if code < 128 then
    return code, at
  elseif code < 144 then
    return map_at(blob, at, code - 128)
  elseif code < 160 then
    return array_at(blob, at, code - 144)
  elseif code < 192 then
    return text_at(blob, at, code - 160)
  elseif code >= 224 then
    return code - 256, at
  elseif CONSTANTS[code] then
    return CONSTANTS[code][1], at
  end
  return wide_at(blob, at, code)
end

function cmsgpack.unpack(blob)
  local value, at = value_at(blob, 1)
  if at <= #blob then
    return value, value_at(blob, at)
  end
  return value
end

-- The offset (from 0) after the value that begins at this one, -1 at the end; and the value.
function cmsgpack.unpack_one(blob, offset)
  local value, at = value_at(blob, offset + 1)
  return at > #blob and -1 or at - 1, value
end
