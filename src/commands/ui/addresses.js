// SPDX-License-Identifier: Apache-2.0
// Addresses and prefixes on the page of `weft ui`, which come as text.
'use strict';

// What is an address, and what is a prefix.
const ADDRESS = /^[0-9a-f.:]+$/i;
const PREFIX = /^[0-9a-f.:]+\/\d+$/i;

// Returns the first and the last address of a prefix and the number of bits of an address. The text may be of another node, and what
// is no prefix has no bits.
function range(prefix) {
  const none = { bits: 0, first: 0n, last: -1n, length: 0 };
  const [text, length] = prefix.split('/');
  const [bits, step, radix] = text.includes(':') ? [128, 16, 16] : [32, 8, 10];
  let parts = text.split('.');
  if (bits === 128) {
    const halves = text.split('::');
    const [before, after] = [halves[0], halves[1]].map((half) => (half ? half.split(':') : []));
    const missing = halves.length === 2 ? 8 - before.length - after.length : 0;
    if (halves.length > 2 || missing < 0) return none;
    parts = [...before, ...new Array(missing).fill('0'), ...after];
  }
  const digits = radix === 16 ? /^[0-9a-f]{1,4}$/i : /^[0-9]{1,3}$/;
  const numbers = parts.map((part) => (digits.test(part) ? parseInt(part, radix) : -1));
  const fits = (number) => number >= 0 && number < 2 ** step;
  if (numbers.length !== bits / step || !numbers.every(fits) || !(Number(length) >= 0 && Number(length) <= bits)) return none;
  const value = numbers.reduce((sum, number) => (sum << BigInt(step)) | BigInt(number), 0n);
  const size = 1n << BigInt(bits - Number(length));
  const first = value / size * size;
  return { bits, first, last: first + size - 1n, length: Number(length) };
}

// Returns the ranges of the subnets in a list. The list of a record that cannot be read has none.
function ranges(subnets) {
  return subnets.split(',').map((part) => part.trim()).filter((part) => PREFIX.test(part)).map(range);
}

// Returns the text of an address of so many bits.
function addressText(value, bits) {
  if (bits === 32) return [24n, 16n, 8n, 0n].map((shift) => (value >> shift) & 255n).join('.');
  const groups = [];
  for (let shift = 112n; shift >= 0n; shift -= 16n) groups.push(((value >> shift) & 0xffffn).toString(16));
  return groups.join(':');
}

// Returns the address of a possible pod: the second one of a subnet.
function podOf(subnets) {
  const { bits, first } = range(subnets.split(',')[0]);
  return addressText(first + 2n, bits);
}

// Somebody may still be typing the address. Then it has no bits, and no subnet contains it.
function contains(subnets, address) {
  const { bits, first } = range(`${address}/${address.includes(':') ? 128 : 32}`);
  return ranges(subnets).some((one) => one.bits === bits && one.first <= first && first <= one.last);
}
