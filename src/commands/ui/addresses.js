// SPDX-License-Identifier: Apache-2.0
// Addresses and prefixes on the page of `weft ui`, which come as text, and the map of them.
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

// What a cell of the map is, with the name of its colour.
const SPACE = [['free', '--c7'], ['own', '--own'], ['taken', '--c1'], ['held', '--c4'], ['conflicting', '--c5'], ['not reached', '--c6']];

// Returns the place in SPACE of the lease of a peer.
function stateOf(peer) {
  if (peer.state === 'held') return 3;
  if (peer.state === 'set-aside' || (peer.state === 'programmed' && peer.reason)) return 4;
  return peer.state === 'programmed' ? 2 : 5;
}

// Returns the cells of the network, and the leases over them. Without a lease of this node there are none.
function spreadSpace(status) {
  const [net] = ranges(status.network);
  const own = net && ranges(status.subnet).find((one) => one.bits === net.bits);
  if (!own || !net.bits) return null;
  // At most 65,536 cells. In a larger network a cell stands for several subnets.
  const depth = Math.min(Math.max(own.length - net.length, 0), 16);
  const size = (net.last - net.first + 1n) >> BigInt(depth);
  const count = 1 << depth;
  const columns = 1 << Math.ceil(depth / 2);
  const made = { net, size, count, columns, state: new Uint8Array(count), spans: new Map(), counts: new Array(SPACE.length).fill(0) };
  const put = (subnets, state, text) => {
    for (const one of ranges(subnets)) {
      if (one.bits !== net.bits || one.last < net.first || one.first > net.last) continue;
      made.counts[state] += 1;
      const begin = one.first < net.first ? 0 : Number((one.first - net.first) / size);
      const end = one.last > net.last ? count - 1 : Number((one.last - net.first) / size);
      const span = made.spans.get(begin * count + end) || { begin, end, state: 0, texts: [] };
      made.spans.set(begin * count + end, span);
      span.state = Math.max(span.state, state);
      if (span.texts.length < 4) span.texts.push(text);
    }
  };
  put(status.subnet, 1, `${status.subnet}: this node`);
  for (const peer of status.peers) {
    put(peer.subnet, stateOf(peer), `${peer.subnet} (${peer.public}): ${peer.state}${peer.reason ? `; ${peer.reason}` : ''}`);
  }
  // Thousands of leases may have the whole network. Those with the same cells are one span, and there are at most 17 spans over each cell.
  for (const { begin, end, state } of made.spans.values()) {
    for (let cell = begin; cell <= end; cell += 1) made.state[cell] = Math.max(made.state[cell], state);
  }
  return made;
}
