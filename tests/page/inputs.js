// SPDX-License-Identifier: Apache-2.0
// Inputs on the page of `weft ui` while nodes, and the lease of this node, come and go. tests/page.rs adds this script to the page, and fails
// if this script or one of the page has an error.
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

  // Somebody has chosen a cell.
  press('#mesh-map', 'ArrowRight', 'ArrowRight', 'ArrowDown', 'ArrowDown');
  check(text('#mesh-cell') === 'n2 10.0.2.0/24', 'the arrow keys choose a cell');
  await refresh(0, 1);
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

  shown.inputs = 'done';
})();
