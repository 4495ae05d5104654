// SPDX-License-Identifier: Apache-2.0
// Inputs on the page of `weft ui` while nodes, and the lease of this node, come and go; then the states of leases, and the keys.
// tests/page.rs adds this script to the page, and fails if this script or one of the page has an error.
'use strict';

(async () => {
  const shown = document.documentElement.dataset;
  const find = (selector) => document.querySelector(selector);
  const text = (selector) => find(selector).textContent;
  const check = (holds, what) => { if (!holds) throw new Error(what); };
  const until = async (holds, what) => {
    for (let tries = 0; tries < 200 && !holds(); tries += 1) await new Promise((resolve) => setTimeout(resolve, 10));
    check(holds(), `timeout: ${what}`);
  };
  const press = (selector, ...keys) => {
    for (const key of keys) find(selector).dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }));
  };
  // The colour of a cell in the picture of a map.
  const pixel = (map, x, y) => map.picture.getContext('2d').getImageData(x, y, 1, 1).data.slice(0, 3).join();

  await until(() => shown.loaded, 'the first answers');
  const answers = {};
  for (const name of ['mesh.json', 'status.json', 'history.json']) answers[name] = await (await fetch(name)).json();
  window.fetch = async (name) => new Response(JSON.stringify(answers[name]));
  const first = answers['mesh.json'];
  const node = (number) => ({ ...first.nodes[0], name: `n${number}`, subnet: `10.0.${number}.0/24`, known: 0, ways: [] });
  // Refreshes the page when there are these nodes. Their number must be another one than before.
  const refresh = async (...numbers) => {
    answers['mesh.json'] = { ...first, nodes: numbers.map(node) };
    find('#reload').click();
    await until(() => text(find('#mesh').hidden ? '#nodes-sum' : '#mesh-sum').startsWith(`${numbers.length} `), `nodes ${numbers}`);
  };

  // The menu of the right button may swallow its release. Then the map does not follow the pointer.
  const canvas = find('#mesh-map');
  canvas.setPointerCapture = () => {};
  canvas.dispatchEvent(new PointerEvent('pointerdown', { clientX: 300, clientY: 300, buttons: 2, button: 2 }));
  check(meshMap.drag, 'a button is down');
  canvas.dispatchEvent(new PointerEvent('pointermove', { clientX: 400, clientY: 400, buttons: 0 }));
  check(!meshMap.drag, 'the button was released');
  meshMap.cursor = null;

  // Somebody has chosen a cell.
  press('#mesh-map', 'ArrowRight', 'ArrowRight', 'ArrowDown', 'ArrowDown');
  check(text('#mesh-cell') === 'n2 10.0.2.0/24', 'the arrow keys choose a cell');
  await refresh(0, 1);
  check(text('#mesh-cell') === '', 'nothing is said of a node that is gone');
  press('#mesh-map', 'Enter');
  check(find('#nodes').hidden, 'a node that is gone is not opened');
  press('#mesh-map', 'ArrowDown');
  await refresh(3, 0, 1);
  press('#mesh-map', 'Enter');
  check(find('#nodes').hidden, 'the node that is at the place of the chosen one now is not opened');

  // There is no node, as before the first lease.
  await refresh();
  press('#mesh-map', 'ArrowRight', 'ArrowDown', '+', '-', 'Enter');
  check(find('#nodes').hidden, 'there is no node to open');

  // Somebody has opened a node.
  await refresh(1, 2);
  press('#mesh-map', 'ArrowDown', 'Enter');
  check(text('#details h2') === 'n2 10.0.2.0/24', 'Enter opens the node of the row');
  await refresh(0, 1, 2);
  check(text('#rows tr[aria-selected="true"] td') === 'n2', 'the row of the opened node stays marked');
  check(text('#details h2') === 'n2 10.0.2.0/24', 'the details stay those of the opened node');
  find('#rows tr:nth-child(2)').focus();
  await refresh(3, 0, 1, 2);
  check(document.activeElement.textContent.startsWith('n1'), 'the focus stays in the row of the node, which is the third one now');
  await refresh(0, 1);
  check(text('#details') === '' && !find('#rows tr[aria-selected="true"]'), 'a node that is gone has no details');

  // The node loses its lease.
  const point = () => {
    const { left, top } = find('#space-map').getBoundingClientRect();
    find('#space-map').dispatchEvent(new PointerEvent('pointermove', { clientX: left + 2, clientY: top + 2 }));
  };
  find('[data-view="space"]').click();
  point();
  check(text('#space-cell').startsWith('10.0.0.0/24'), 'pointing at a cell describes it');
  answers['status.json'] = { ...answers['status.json'], subnet: '' };
  find('#reload').click();
  await until(() => text('#space-sum') === 'The node has no lease yet.', 'the lost lease');
  point();
  press('#space-map', 'ArrowRight', 'ArrowDown', 'Enter');
  check(text('#space-cell') === '', 'without a lease there is no cell to describe');

  // Leases in each state. The first cell is that of this node.
  const cells = [['10.0.0.0/24', 'this node', '--own'], ['10.0.1.0/24', 'programmed', '--c1'], ['10.0.2.0/24', 'held', '--c4'],
    ['10.0.3.0/24', 'set-aside; two nodes', '--c5'], ['10.0.4.0/24', 'programmed; two nodes', '--c5'],
    ['10.0.5.0/24', 'unreachable', '--c6'], ['10.0.6.0/24', 'free', '--c7']];
  const peers = cells.slice(1, 6).map(([subnet, said]) => {
    const [state, reason] = said.split('; ');
    return { subnet, public: '192.168.0.2', state, reason };
  });
  answers['status.json'] = { ...answers['status.json'], subnet: '10.0.0.0/24', network: '10.0.0.0/16', peers };
  find('#reload').click();
  await until(() => text('#space-sum').includes('250 of 256 cells are free'), 'the leases in each state');
  const legends = [...find('#space-legend').children].map((entry) => entry.textContent).join('; ');
  check(legends === 'free; own (1); taken (1); held (1); conflicting (2); not reached (1)', legends);
  press('#space-map', 'ArrowLeft');
  for (const [at, [subnet, said, colours]] of cells.entries()) {
    const cell = text('#space-cell');
    check(cell.startsWith(subnet) && cell.endsWith(`: ${said}`), `${subnet} is described: ${cell}`);
    check(pixel(spaceMap, at, 0) === bytes(colours).join(), `${subnet} has the colour ${colours}`);
    press('#space-map', 'ArrowRight');
  }

  // Many leases of the whole network cost as much as one of them. Each cell is counted that is compared with a lease.
  const { max } = Math;
  let compared = 0;
  Math.max = (...numbers) => { compared += 1; return max(...numbers); };
  const large = { subnet: '10.0.0.0/8', public: '192.168.0.2', state: 'set-aside', reason: 'too large' };
  answers['status.json'] = { ...answers['status.json'], network: '10.0.0.0/8', peers: new Array(200).fill(large) };
  find('#reload').click();
  await until(() => text('#space-sum').includes('; 0 of 65536 cells are free'), 'the large leases');
  Math.max = max;
  check(compared < 200000, `${compared} comparisons for 65,536 cells`);
  check(text('#space-legend').includes('conflicting (200)'), 'each large lease is counted');
  press('#space-map', 'ArrowLeft');
  const said = text('#space-cell').split('\n');
  check(said[0] === '10.0.0.0/24: this node' && said[1].endsWith('; too large') && said.length === 4, 'four leases of a cell are named');

  // Keys choose the view.
  const isShown = (name) => VIEWS.every((other) => find(`#${other}`).hidden === (other !== name)
    && find(`[data-view="${other}"]`).getAttribute('aria-selected') === String(other === name));
  for (const [at, name] of VIEWS.entries()) {
    press('body', String(at + 1));
    check(isShown(name) && location.hash === `#${name}`, `the key ${at + 1} shows ${name}`);
    const [tab, key] = ['', ' kbd'].map((inner) => getComputedStyle(find(`[data-view="${name}"]${inner}`)).color);
    check(tab === key, `the key in the chosen button of ${name} has the colour of its text`);
  }
  press('body', '6');
  find('body').dispatchEvent(new KeyboardEvent('keydown', { key: '1', ctrlKey: true, bubbles: true }));
  check(isShown('explain'), 'no view has the key 6, and Ctrl and a key are for the browser');

  // Of too many nodes the first ones are shown. A way to a node that is not shown is left out.
  const many = Array.from({ length: 5001 }, (_, number) => ({ ...node(number), subnet: `10.${number >> 8}.${number & 255}.0/24` }));
  many[0].ways = [4999, 5, 100, -1, -1, 5000, 5, 100, -1, -1];
  answers['mesh.json'] = { ...first, nodes: many };
  press('body', 'r');
  await until(() => text('#notice').startsWith('of 5001 nodes, the first 5000 are shown'), 'the notice of too many nodes');
  check(mesh.nodes.length === 5000 && classes.length === 25e6 && classes[4999] === BROKEN && classes[5000] === UNKNOWN, 'the ways of 5000 nodes');
  answers['mesh.json'] = first;
  press('body', 'r');
  await until(() => find('#notice').hidden, 'all nodes');

  // The key r refreshes, and the key w puts the node first whose ways are broken.
  press('body', '1');
  answers['mesh.json'] = { ...first, nodes: [node(0), node(1), { ...node(2), ways: [0, 5, 100, -1, -1, 1, 5, 100, -1, -1] }] };
  press('body', 'r');
  await until(() => text('#mesh-sum') === '3 nodes, 3 answered; 2 broken ways, 0 lose packets', 'the key r');
  for (const [worst, wanted] of [[false, 'n0 10.0.0.0/24'], [true, 'n2 10.0.2.0/24'], [false, 'n0 10.0.0.0/24']]) {
    if (find('#worst').checked !== worst) press('body', 'w');
    press('#mesh-map', 'ArrowUp', 'ArrowUp', 'ArrowLeft', 'ArrowLeft');
    check(find('#worst').checked === worst && text('#mesh-cell') === wanted, `the first node is ${wanted}`);
  }

  // What is said of a cell is as new as the map.
  press('#mesh-map', 'ArrowDown', 'ArrowDown');
  check(text('#mesh-cell') === 'n2 10.0.2.0/24 to n0 10.0.0.0/24: broken; loss 100 %', 'the broken way is described');
  const broken = answers['mesh.json'];
  answers['mesh.json'] = { ...first, nodes: [node(0), node(1), { ...node(2), ways: [0, 0, 0, 300, 1450, 1, 5, 100, -1, -1] }] };
  press('body', 'r');
  await until(() => text('#mesh-sum').includes('; 1 broken ways'), 'one way is mended');
  check(text('#mesh-cell').endsWith(': a; loss 0 %; round trip 0.30 ms; path MTU 1450'), 'the way that was mended is described');
  answers['mesh.json'] = broken;
  press('body', 'r');
  await until(() => text('#mesh-sum').includes('; 2 broken ways'), 'both ways are broken again');

  // The key d changes between dark and light, also in the maps. The broken way from n2 to n0 is in the first column of the third row.
  const seen = {};
  for (let times = 0; times < 2; times += 1) {
    press('body', 'd');
    seen[shown.theme] = [getComputedStyle(find('body')).backgroundColor, pixel(meshMap, 0, 2)];
    check(pixel(meshMap, 0, 2) === bytes('--c5').join(), `${shown.theme}: the broken way has its colour`);
  }
  check(seen.dark && seen.light && seen.dark.every((colours, at) => colours !== seen.light[at]), 'dark and light differ');

  // The key / goes to the filter, where keys are letters.
  press('body', '/');
  check(isShown('nodes') && document.activeElement === find('#filter'), 'the key / goes to the filter');
  const before = shown.theme;
  press('#filter', '1', 'd', 'w');
  check(isShown('nodes') && shown.theme === before && !find('#worst').checked, 'in the filter keys are letters');
  find('#filter').value = 'n1';
  find('#filter').dispatchEvent(new Event('input'));
  check(text('#nodes-sum') === '1 of 3 nodes' && text('#rows').startsWith('n1'), 'the filter leaves one node');
  press('#filter', 'Escape');
  check(document.activeElement !== find('#filter'), 'Escape leaves the filter');

  // A refresh without news leaves what is selected, and alarms nobody again.
  press('body', '5');
  [find('#from').value, find('#to').value] = ['10.0.0.2', '10.0.1.2'];
  find('#question').dispatchEvent(new Event('input'));
  answers['mesh.json'] = { ...answers['mesh.json'], notice: 'only its own row is known' };
  press('body', 'r');
  await until(() => !find('#notice').hidden, 'the notice');
  const [command, notice] = [find('#explain-there code'), find('#notice').firstChild];
  answers['status.json'] = { ...answers['status.json'], version: '2' };
  press('body', 'r');
  await until(() => text('#title').startsWith('weft 2'), 'the next refresh');
  check(command && command === find('#explain-there code') && notice === find('#notice').firstChild, 'a refresh leaves what has not changed');

  // An answer that never comes does not keep the page from asking again. The signal of each question ends it.
  const answering = window.fetch;
  const { timeout } = AbortSignal;
  AbortSignal.timeout = () => timeout.call(AbortSignal, 20);
  window.fetch = (name, { signal }) => new Promise((_, reject) => { signal.addEventListener('abort', () => reject(signal.reason)); });
  press('body', 'r');
  await until(() => /^weft ui does not answer \(.+\): .+\. What is shown may be old\.$/.test(text('#notice')), 'the silence of weft ui');
  check(text('#title').startsWith('weft 2'), 'what was shown stays');
  window.fetch = async () => new Response('no agent answers\n', { status: 502 });
  press('body', 'r');
  await until(() => text('#notice') === 'no agent answers. What is shown may be old.', 'the silence of the agent');
  window.fetch = answering;
  press('body', 'r');
  await until(() => text('#notice') === 'only its own row is known', 'the next answers');

  // The history has the words of `weft history`. What is not known is not said to be none, and the end of an agent wrote nothing.
  const change = (before, after, more) => ({ entry: 'route 10.0.1.0/24', before, after, ...more });
  answers['history.json'] = [
    { at_ms: 0, cause: 'start', event: 'the agent before this one was killed', took_us: 0, done: 0, failed: 0 },
    { at_ms: 1, cause: 'kernel', event: 'others', took_us: 1200, done: 3, failed: 1, changes: [change(null, 'via 10.0.1.0', { by: 'another program deleted it' }),
      change('via 1.1.1.1', 'via 10.0.1.0'), change(null, null), change(null, 'via 10.0.1.0', { error: 'no carrier' })] }];
  press('body', '4');
  press('body', 'r');
  await until(() => find('#records').children.length === 2, 'the history');
  const history = [...find('#records').children].flatMap((record) => record.textContent.split('\n').map((line) => line.trim()));
  const wanted = ['1970-01-01T00:00:00.001Z  kernel: others; 3 written, 1 refused in 1.2 ms', 'add       route 10.0.1.0/24  via 10.0.1.0 (another program deleted it)',
    'replace   route 10.0.1.0/24  via 1.1.1.1 -> via 10.0.1.0', 'remove    route 10.0.1.0/24', 'refused   route 10.0.1.0/24  via 10.0.1.0 (no carrier)',
    '1970-01-01T00:00:00.000Z  start: the agent before this one was killed'];
  check(history.join('|') === wanted.join('|'), history.join('|'));

  shown.inputs = 'done';
})();
