// SPDX-License-Identifier: Apache-2.0
//! The preview, which is the answer to `weft plan`: what the next full pass would write. The node hands out the operations as they are. They
//! become text here, when the answer is written to the socket.

use std::fmt::Write;

use serde::{Deserialize, Serialize};
use weft_backends::diff::Op;
use weft_backends::state::ObservedValue;

use super::entries;
use crate::log::text::printable;

/// An operation that a full pass would carry out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreviewOp {
    /// The operation.
    pub op: Op,
    /// What is in the kernel now, if the entry exists.
    pub before: Option<ObservedValue>,
}

/// What an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// The entry does not exist and is created.
    Add,
    /// The entry exists and is changed in place.
    Replace,
    /// The device is deleted and created again. Then its entries are written again.
    Recreate,
    /// The entry is deleted.
    Remove,
}

impl Action {
    /// Returns the word of JSON and tables.
    pub fn word(self) -> &'static str {
        match self {
            Action::Add => "add",
            Action::Replace => "replace",
            Action::Recreate => "recreate",
            Action::Remove => "remove",
        }
    }
}

/// An operation as text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// What it does.
    pub action: Action,
    /// The entry, such as `route 10.5.2.0/24`.
    pub entry: String,
    /// The value in the kernel, if the entry exists.
    pub before: Option<String>,
    /// The value that is wanted, if the entry is not removed.
    pub after: Option<String>,
}

impl From<PreviewOp> for Operation {
    fn from(PreviewOp { op, before }: PreviewOp) -> Operation {
        let (action, after) = match (&op, &before) {
            (Op::Ensure(_, value), None) => (Action::Add, Some(value)),
            (Op::Ensure(_, value), Some(_)) => (Action::Replace, Some(value)),
            (Op::Recreate(_, value), _) => (Action::Recreate, Some(value)),
            (Op::Remove(..), _) => (Action::Remove, None),
        };
        let key = op.key();
        let before = before.map(|seen| entries::seen(&key, &seen));
        Operation { action, entry: key.to_string(), before, after: after.map(entries::value) }
    }
}

/// The whole answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preview {
    /// The operations in the order in which they would be written.
    pub operations: Vec<Operation>,
}

/// Returns the answer for people: one line for each operation, and a line with their number.
pub fn render(preview: &Preview) -> String {
    if preview.operations.is_empty() {
        return "nothing to write: the kernel is as it should be\n".to_owned();
    }
    let mut out = String::new();
    let width = preview.operations.iter().map(|operation| operation.entry.chars().count()).max().unwrap_or_default();
    for Operation { action, entry, before, after } in &preview.operations {
        let values = entries::change(before.as_deref(), after.as_deref());
        let line = format!("{:8}  {entry:width$}  {values}", action.word());
        // Writing into a String cannot fail.
        let _ = writeln!(out, "{}", printable(line.trim_end()));
    }
    let counts = [Action::Add, Action::Replace, Action::Recreate, Action::Remove].map(|action| {
        let count = preview.operations.iter().filter(|operation| operation.action == action).count();
        (count > 0).then(|| format!("{count} to {}", action.word()))
    });
    let counts: Vec<String> = counts.into_iter().flatten().collect();
    let count = preview.operations.len();
    let noun = if count == 1 { "operation" } else { "operations" };
    let _ = writeln!(out, "\n{count} {noun}: {}", counts.join(", "));
    out
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weft_backends::ipip::IpipLink;
    use weft_backends::link::Link;
    use weft_backends::owner::PROTOCOL;
    use weft_backends::state::{Key, Name, Route, Value};

    use super::*;

    fn route(via: &str) -> Value {
        let dev = Name::new("eth0").unwrap();
        Value::Route(Route::Unicast { via: via.parse().unwrap(), dev, onlink: false })
    }

    #[test]
    fn operations_show_what_is_and_what_should_be_and_whose_route_is_replaced() {
        let key = Key::Route("10.5.2.0/24".parse().unwrap(), 0);
        let seen = |protocol| Some(ObservedValue { value: route("192.168.0.9"), protocol, mark: false });
        let ops = [
            PreviewOp { op: Op::Ensure(key, route("192.168.0.2")), before: None },
            PreviewOp { op: Op::Ensure(key, route("192.168.0.2")), before: seen(12) },
            PreviewOp { op: Op::Remove(key, route("192.168.0.9")), before: seen(PROTOCOL) },
        ];
        let preview = Preview { operations: ops.into_iter().map(Operation::from).collect() };
        let text = render(&preview);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "add       route 10.5.2.0/24  via 192.168.0.2 dev eth0",
                "replace   route 10.5.2.0/24  via 192.168.0.9 dev eth0 protocol bird -> via 192.168.0.2 dev eth0",
                "remove    route 10.5.2.0/24  via 192.168.0.9 dev eth0",
                "",
                "3 operations: 1 to add, 1 to replace, 1 to remove",
            ]
        );
        let json = serde_json::to_string(&preview.operations[0]).unwrap();
        assert_eq!(
            json,
            r#"{"action":"add","entry":"route 10.5.2.0/24","before":null,"after":"via 192.168.0.2 dev eth0"}"#
        );
        assert_eq!(render(&Preview::default()), "nothing to write: the kernel is as it should be\n");
    }

    /// A device of flannel is taken over: weft only adds its mark. One of another type is made again.
    #[test]
    fn a_device_that_is_made_again_and_one_without_our_mark_are_shown_as_such() {
        let key = Key::Link(Name::new("flannel.ipip").unwrap());
        let link = |local: &str| {
            let kind = Arc::new(IpipLink { local: local.parse().unwrap(), bound: false });
            Value::link(Link { kind, mtu: 1480, mac: None, up: true })
        };
        let shown = |op, mark| {
            let before = Some(ObservedValue { value: link("192.168.0.1"), protocol: 0, mark });
            let Operation { action, before, after, .. } = Operation::from(PreviewOp { op, before });
            (action, before.unwrap(), after.is_some())
        };
        let text = "ipip local 192.168.0.1 mtu 1480 up";
        let kept = Op::Ensure(key, link("192.168.0.1"));
        let unmarked = format!("{text}, not marked as made by this agent");
        assert_eq!(shown(kept.clone(), false), (Action::Replace, unmarked, true));
        assert_eq!(shown(kept, true), (Action::Replace, text.to_owned(), true));
        let again = Op::Recreate(key, link("192.168.0.2"));
        assert_eq!(shown(again.clone(), true), (Action::Recreate, text.to_owned(), true));
        let operations = vec![Operation::from(PreviewOp { op: again, before: None })];
        assert!(render(&Preview { operations }).ends_with("\n\n1 operation: 1 to recreate\n"));
    }
}
