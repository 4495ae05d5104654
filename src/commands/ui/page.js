// SPDX-License-Identifier: Apache-2.0
// The page of `weft ui`. It reads three files of JSON and draws them, and asks for the explanation of a packet. All texts come from other nodes, so they only ever become text.
'use strict';

const $ = (id) => document.getElementById(id);
const VIEWS = ['mesh', 'space', 'nodes', 'history', 'explain'];
// The numbers of the classes of ways, as `weft ui` sends them.
const [FASTEST, FAST, SLOW, SLOWEST, LOSSY, BROKEN, UNWRITTEN, UNASKED, UNKNOWN] = Array(9).keys();
// These classes in the order of their urgency.
const URGENCY = [FASTEST, FAST, SLOW, SLOWEST, UNWRITTEN, UNKNOWN, UNASKED, LOSSY, BROKEN];

// The pairs of so many nodes are 25 million. Anybody who may write to the store may write leases of more nodes than a browser can bear.
const MAX_NODES = 5000;

let mesh = null, status = null, records = [];
let order = [];          // places of the nodes, as they are shown
let classes = null;      // one byte for each pair
let view = 'mesh';
let selected = null;     // the subnet of the node whose details are shown

window.addEventListener('error', (event) => { root.dataset.error = event.message; });
window.addEventListener('unhandledrejection', (event) => { root.dataset.error = String(event.reason); });

// Sets a text, unless it is there already: screen readers read it out each time when it is set.
function say(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

// Replaces what a place contains, unless its text is the same: then the focus and what is selected stay, and nothing is read out again.
function replace(place, parts) {
  if (parts.map((part) => part.textContent).join('') !== place.textContent) place.replaceChildren(...parts);
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function bytes(name) {
  const hex = colour(name).slice(1);
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function label(node) {
  return node.name ? `${node.name} ${node.subnet}` : node.subnet;
}

const meshMap = new CellMap($('mesh-map'), 0, 0, describeWay, (x, y) => openNode(order[y]));
const spaceMap = new CellMap($('space-map'), 0, 0, describeSubnet);

// ---- The mesh

function spread() {
  const all = mesh.nodes.length;
  const count = Math.min(all, MAX_NODES);
  mesh.nodes.length = count;
  if (count < all) mesh.notice = [`of ${all} nodes, the first ${count} are shown: weft mesh --all -o json has all of them`, mesh.notice].filter(Boolean).join('; ');
  classes = new Uint8Array(count * count).fill(UNKNOWN);
  mesh.nodes.forEach((node, from) => {
    node.places = new Map();
    for (let at = 0; at < node.ways.length; at += 5) {
      if (node.ways[at] >= count) continue;
      classes[from * count + node.ways[at]] = node.ways[at + 1];
      node.places.set(node.ways[at], at);
    }
  });
}

function drawMesh() {
  const begin = performance.now();
  const count = mesh.nodes.length;
  order = mesh.nodes.map((_, place) => place);
  if ($('worst').checked) {
    const bad = new Float64Array(count);
    for (let from = 0; from < count; from += 1) {
      for (let to = 0; to < count; to += 1) {
        if (from === to) continue;
        const number = classes[from * count + to];
        const weight = number === BROKEN ? 2000 : number === LOSSY ? 1000 : URGENCY.indexOf(number);
        bad[from] += weight; bad[to] += weight;
      }
    }
    order.sort((a, b) => bad[b] - bad[a] || a - b);
  }
  const palette = mesh.classes.map((_, number) => bytes(`--c${number}`));
  meshMap.fill(count, count, (cell) => {
    const [from, to] = [order[Math.floor(cell / count)], order[cell % count]];
    return from === to ? null : palette[classes[from * count + to]];
  });
  const counts = new Array(mesh.classes.length).fill(0);
  classes.forEach((number, cell) => { if (cell % (count + 1) !== 0) counts[number] += 1; });
  const answered = mesh.nodes.filter((node) => !node.error).length;
  $('mesh-sum').textContent = `${count} nodes, ${answered} answered; ${counts[BROKEN]} broken ways, ${counts[LOSSY]} lose packets`;
  legend($('mesh-legend'), mesh.classes.map((meaning, number) => [`${meaning} (${counts[number]})`, `--c${number}`]));
  root.dataset.broken = counts[BROKEN];
  root.dataset.nodes = count;
  root.dataset.paint = Math.round(performance.now() - begin);
}

function legend(place, entries) {
  place.replaceChildren(...entries.map(([text, name]) => {
    const entry = element('span', text);
    const mark = element('i');
    mark.style.background = `var(${name})`;
    entry.prepend(mark);
    return entry;
  }));
}

function wayText(from, to) {
  const [sender, receiver] = [mesh.nodes[from], mesh.nodes[to]];
  const at = sender.places.get(to);
  const number = classes[from * mesh.nodes.length + to];
  let text = `${label(sender)} to ${label(receiver)}: ${mesh.classes[number]}`;
  if (at !== undefined) {
    const [loss, trip, mtu] = sender.ways.slice(at + 2, at + 5);
    if (loss >= 0) text += `; loss ${loss} %`;
    if (trip >= 0) text += `; round trip ${(trip / 1000).toFixed(2)} ms`;
    if (mtu >= 0) text += `; path MTU ${mtu}`;
  }
  const reason = sender.reasons[to] || sender.error;
  return reason ? `${text}\n${reason}` : text;
}

// Describes a cell below the map. Without a cell nothing is said.
function describeWay(x, y) {
  if (x === undefined) return say('mesh-cell', '');
  const [from, to] = [order[y], order[x]];
  return say('mesh-cell', from === to ? label(mesh.nodes[from]) : wayText(from, to));
}

// ---- The address space

let space = null;

function drawSpace() {
  space = spreadSpace(status);
  if (!space) {
    $('space-sum').textContent = 'The node has no lease yet.';
    $('space-legend').replaceChildren();
    spaceMap.fill(0, 0);
    return;
  }
  const palette = SPACE.map(([, name]) => bytes(name));
  spaceMap.fill(space.columns, Math.ceil(space.count / space.columns), (cell) => palette[space.state[cell]]);
  const free = space.state.filter((state) => state === 0).length;
  $('space-sum').textContent = `Network ${status.network}; ${free} of ${space.count} cells are free`;
  legend($('space-legend'), SPACE.map(([text, name], state) => [state ? `${text} (${space.counts[state]})` : text, name]));
  root.dataset.taken = space.counts.slice(1).reduce((sum, one) => sum + one, 0);
}

function describeSubnet(x, y) {
  if (x === undefined) return say('space-cell', '');
  const cell = y * space.columns + x;
  const first = space.net.first + BigInt(cell) * space.size;
  const length = space.net.bits - (space.size.toString(2).length - 1);
  const who = [...space.spans.values()].filter(({ begin, end }) => begin <= cell && cell <= end).flatMap(({ texts }) => texts).slice(0, 4);
  return say('space-cell', who.length ? who.join('\n') : `${addressText(first, space.net.bits)}/${length}: free`);
}

// ---- The nodes

function faults(node) {
  let bad = 0;
  for (let at = 0; at < node.ways.length; at += 5) bad += node.ways[at + 1] === BROKEN ? 1 : 0;
  return bad;
}

function stateText(node) {
  if (node.error) return 'no answer';
  return node.ready ? 'ready' : 'not ready';
}

function drawNodes() {
  const wanted = $('filter').value.toLowerCase();
  const shown = mesh.nodes.map((node, place) => [node, place]).filter(([node]) =>
    !wanted || [node.name, node.subnet, node.public, stateText(node), node.error, ...node.problems].join(' ').toLowerCase().includes(wanted));
  // The row with the focus becomes another element.
  const focused = document.activeElement?.closest('#rows tr')?.dataset.subnet;
  $('rows').replaceChildren(...shown.map(([node, place]) => {
    const row = element('tr');
    const bad = faults(node);
    row.tabIndex = 0;
    row.dataset.place = place;
    row.dataset.subnet = node.subnet;
    row.className = `${node.error || !node.ready ? 'bad' : ''} ${bad ? 'broken' : ''}`;
    row.setAttribute('aria-selected', String(node.subnet === selected));
    const problem = node.error || node.problems[0] || '';
    const ways = node.error ? '' : `${node.known}${bad ? `, ${bad} broken` : ''}`;
    for (const text of [node.name, node.subnet, node.public, stateText(node), ways, problem]) row.append(element('td', text));
    return row;
  }));
  $('nodes-sum').textContent = `${shown.length} of ${mesh.nodes.length} nodes`;
  [...$('rows').children].find((row) => row.dataset.subnet === focused)?.focus({ preventScroll: true });
  replace($('details'), details(mesh.nodes.findIndex((node) => node.subnet === selected)));
}

function openNode(place) {
  selected = mesh.nodes[place].subnet;
  show('nodes');
}

// Returns the elements that describe the node at a place. Without a node there are none.
function details(place) {
  const node = mesh.nodes[place];
  if (!node) return [];
  const parts = [element('h2', label(node)), element('p', `${node.public}; ${node.backend} ${node.version}; MTU ${node.mtu}; ${stateText(node)}`)];
  if (node.error) parts.push(element('p', node.error));
  if (node.problems.length) parts.push(element('h2', 'Problems'), list(node.problems));
  const count = mesh.nodes.length;
  const ways = [];
  for (let other = 0; other < count; other += 1) {
    if (other === place) continue;
    for (const [from, to] of [[place, other], [other, place]]) {
      const number = classes[from * count + to];
      if ([UNWRITTEN, LOSSY, BROKEN].includes(number)) ways.push([URGENCY.indexOf(number), wayText(from, to)]);
    }
  }
  if (status.subnet && node.subnet !== status.subnet) {
    const button = element('button', 'Explain a packet of this page\'s node to it');
    button.addEventListener('click', () => {
      [$('from').value, $('to').value, $('port').value] = [podOf(status.subnet), podOf(node.subnet), ''];
      show('explain');
      explain();
    });
    parts.push(button);
  }
  ways.sort((a, b) => b[0] - a[0]);
  if (ways.length) parts.push(element('h2', `Ways with a fault (${ways.length})`), list(ways.slice(0, 50).map(([, text]) => text)));
  return parts;
}

function list(texts) {
  const made = element('ul');
  made.append(...texts.map((text) => element('li', text)));
  return made;
}

// ---- The explanation of a packet

// Returns the published address of the peer that has an address.
function publicOf(address) {
  const peer = status.peers.find((one) => contains(one.subnet, address) || one.public.split(',').includes(address));
  const found = peer && peer.public.split(',')[0];
  return found && ADDRESS.test(found) ? found : null;
}

// The tables of another node are known there alone. What is shown is meant to be pasted into a shell, and a link or a lease may contain anything:
// nothing but addresses and a number gets into it.
function drawExplain() {
  const [from, to, port] = ['from', 'to', 'port'].map((id) => $(id).value.trim());
  const isPacket = ADDRESS.test(from) && ADDRESS.test(to) && /^\d*$/.test(port);
  const others = isPacket ? [...new Set([publicOf(from), publicOf(to)])].filter(Boolean) : [];
  $('explain-where').textContent = `What ${status.node || 'this node'} does with the packet.${others.length ? ' To see what the other node does with it:' : ''}`;
  replace($('explain-there'), others.map((node) =>
    element('code', `ssh root@${node} 'PATH=$PATH:/opt/cni/bin; weft explain ${from} ${to}${port && ` --port ${port}`}'`)));
}

async function explain() {
  const question = ['from', 'to', 'port'].map((id) => $(id).value.trim()).filter(Boolean);
  window.history.replaceState(null, '', `#explain/${question.join('/')}`);
  drawExplain();
  $('steps').replaceChildren();
  $('answer').className = 'cell';
  $('answer').textContent = 'Reading the tables of the kernel ...';
  try {
    const report = await read(`explain/${question.map(encodeURI).join('/')}`);
    $('steps').replaceChildren(...report.steps.map((step) => {
      const lines = [`${step.state.padEnd(8)}${step.step}: ${step.is}`];
      if (step.should_be) lines.push(`        should be: ${step.should_be}`);
      if (step.mtu) lines.push(`        MTU ${step.mtu}`);
      return element('li', lines.join('\n'), step.state);
    }));
    $('answer').className = `cell ${report.verdict}`;
    $('answer').textContent = [`${report.from} (${report.from_is}) to ${report.to} (${report.to_is})`, report.sentence, report.remedy && `Remedy: ${report.remedy}`]
      .filter(Boolean).join('\n');
    root.dataset.verdict = report.verdict;
  } catch (error) {
    $('answer').textContent = error.message || String(error);
  }
}

// ---- The history

// Returns a change as `weft history` shows it. Without a value before there was no entry, or the value is not known.
function changeText({ entry, before, after, by, error }) {
  const without = (value) => value === null || value === undefined;
  const word = error ? 'refused' : without(after) ? 'remove' : without(before) ? 'add' : 'replace';
  const values = [before, after].filter((value) => !without(value)).join(' -> ');
  return `    ${word.padEnd(8)}  ${entry}  ${values}${[by, error].filter(Boolean).map((note) => ` (${note})`).join('')}`;
}

function drawHistory() {
  replace($('records'), records.slice().reverse().map((record) => {
    const took = record.took_us ? ` in ${(record.took_us / 1000).toFixed(1)} ms` : '';
    const refused = record.failed ? `, ${record.failed} refused` : '';
    // The end of an earlier agent is no pass.
    const result = record.done || record.failed ? `; ${record.done} written${refused}${took}` : '';
    const lines = [`${new Date(record.at_ms).toISOString()}  ${record.cause}: ${record.event}${result}`];
    lines.push(...(record.changes || []).map(changeText));
    for (const [kind, number] of Object.entries(record.counts || {})) lines.push(`    ${number} ${kind}`);
    return element('li', lines.join('\n'));
  }));
}

// ---- The frame

function show(name) {
  view = name;
  for (const other of VIEWS) {
    $(other).hidden = other !== name;
    document.querySelector(`[data-view="${other}"]`).setAttribute('aria-selected', String(other === name));
  }
  if (!window.location.hash.startsWith(`#${name}`)) window.history.replaceState(null, '', `#${name}`);
  if (mesh) draw();
}

function draw() {
  if (view === 'mesh') drawMesh();
  if (view === 'space' && status) drawSpace();
  if (view === 'nodes') drawNodes();
  if (view === 'history') drawHistory();
  if (view === 'explain' && status) drawExplain();
}

// Behind a dead connection, such as that of ssh, an answer never comes. An answer that comes takes at most 90 s.
const ANSWER_MS = 100000;

async function read(name) {
  const answer = await fetch(name, { signal: AbortSignal.timeout(ANSWER_MS) }).catch((error) => {
    throw new Error(`weft ui does not answer (${error.message}): see whether it still runs, and the ssh that leads to it; a new start has a new address`);
  });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

let loading = false;

async function load() {
  if (loading) return;
  loading = true;
  try {
    [mesh, status, records] = await Promise.all(['mesh.json', 'status.json', 'history.json'].map(read));
    spread();
    say('notice', mesh.notice);
    $('title').textContent = `weft ${status.version}: ${status.node} ${status.subnet}`;
    document.title = `weft: ${status.node}`;
    $('age').textContent = `as of ${new Date(mesh.at_ms).toLocaleString()}`;
    draw();
    root.dataset.loaded = 'yes';
  } catch (error) {
    say('notice', `${(error.message || String(error)).trim()}. What is shown may be old.`);
  } finally {
    $('notice').hidden = !$('notice').textContent;
    loading = false;
  }
}

function theme() {
  const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
  if (mesh) draw();
}

document.querySelectorAll('[data-view]').forEach((tab) => tab.addEventListener('click', () => show(tab.dataset.view)));
$('reload').addEventListener('click', load);
$('theme').addEventListener('click', theme);
$('worst').addEventListener('change', drawMesh);
$('filter').addEventListener('input', drawNodes);
$('rows').addEventListener('click', (event) => { const row = event.target.closest('tr'); if (row) openNode(Number(row.dataset.place)); });
$('rows').addEventListener('keydown', (event) => { if (event.key === 'Enter') openNode(Number(event.target.dataset.place)); });
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => mesh && draw());
document.addEventListener('keydown', (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (event.target.matches('input:not([type=checkbox])')) { if (event.key === 'Escape') event.target.blur(); return; }
  if (VIEWS['12345'.indexOf(event.key)]) show(VIEWS['12345'.indexOf(event.key)]);
  else if (event.key === 'r') load();
  else if (event.key === 'd') theme();
  else if (event.key === 'w') { $('worst').checked = !$('worst').checked; if (view === 'mesh') drawMesh(); }
  else if (event.key === '/') { show('nodes'); $('filter').focus(); event.preventDefault(); }
});

$('question').addEventListener('submit', (event) => { event.preventDefault(); explain(); });
$('question').addEventListener('input', () => status && drawExplain());

// The address of the page may name a view, and the packet to be explained.
const [first, ...question] = location.hash.slice(1).split('/');
show(VIEWS.includes(first) ? first : 'mesh');
['from', 'to', 'port'].forEach((id, at) => { $(id).value = question[at] || ''; });
load().then(() => { if (view === 'explain' && question.length > 1) explain(); });
setInterval(() => { if (!document.hidden) load(); }, 10000);
