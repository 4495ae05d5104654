// SPDX-License-Identifier: Apache-2.0
//! The mesh of all nodes as a picture: a heat map with a row for each node that sends and a column for each node that receives.

use std::fmt::Write;

use crate::observe::mesh::cluster::{Cluster, ClusterNode};
use crate::observe::mesh::quality::Quality;
use crate::observe::status::PeerState;

/// Width of the map in pixels, as far as the cells are not too small or too large for it.
const WIDTH: usize = 900;
/// Smallest and largest side of a cell in pixels.
const CELL: (usize, usize) = (1, 28);
/// Smallest width of the picture without its right margin, so that the legend has room.
const MIN_WIDTH: usize = 840;
/// Smallest side of a cell beside which there is room for a label.
const MIN_LABELLED: usize = 9;
/// Largest cluster in which each cell says what it shows when the pointer is on it.
const MAX_TITLES: usize = 48;
/// Space around the map in pixels.
const MARGIN: usize = 16;
/// Space above the map for the heading.
const HEADING: usize = 56;
/// Space below the map for the legend.
const LEGEND: usize = 56;
/// Width of a character of a label in pixels.
const CHARACTER: usize = 7;

/// The class of a way. The page of `weft ui` has the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WayClass {
    /// The round trip takes less than 0.5 ms.
    Fastest,
    /// It takes less than 2 ms.
    Fast,
    /// It takes less than 10 ms.
    Slow,
    /// It takes 10 ms or more.
    Slowest,
    /// Some packets get lost.
    Lossy,
    /// Packets do not reach the peer.
    Broken,
    /// The entries of the peer are not in the kernel, or only for the grace time.
    Unwritten,
    /// The peer was not asked yet.
    Unasked,
    /// Nothing is known of the way.
    Unknown,
}

/// How the cells of a class look.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// The class.
    pub class: WayClass,
    /// Name of the CSS class.
    name: &'static str,
    /// Colour on white.
    pub light: &'static str,
    /// Colour on black.
    pub dark: &'static str,
    /// What the legend says.
    pub meaning: &'static str,
}

/// The looks of all classes, in the order of [`WayClass`].
pub const LOOKS: [Look; 9] = [
    Look { class: WayClass::Fastest, name: "a", light: "#c6e7d8", dark: "#1d4a3a", meaning: "below 0.5 ms" },
    Look { class: WayClass::Fast, name: "b", light: "#8fd0b5", dark: "#256b51", meaning: "below 2 ms" },
    Look { class: WayClass::Slow, name: "c", light: "#4faf8c", dark: "#339170", meaning: "below 10 ms" },
    Look { class: WayClass::Slowest, name: "d", light: "#247a5c", dark: "#5fc39d", meaning: "10 ms and more" },
    Look { class: WayClass::Lossy, name: "l", light: "#f2b134", dark: "#d99a1c", meaning: "loses packets" },
    Look { class: WayClass::Broken, name: "x", light: "#d1313d", dark: "#f0525e", meaning: "broken" },
    Look { class: WayClass::Unwritten, name: "w", light: "#8a63c9", dark: "#a685dd", meaning: "not in the kernel" },
    Look { class: WayClass::Unasked, name: "n", light: "#e3e6ea", dark: "#30353c", meaning: "not asked yet" },
    Look { class: WayClass::Unknown, name: "u", light: "#b4bac2", dark: "#555c66", meaning: "unknown" },
];

impl WayClass {
    /// Returns the class of a way. `None` is a way of which nothing is known.
    pub fn of(way: Option<&Quality>) -> WayClass {
        let Some(Quality { state, loss, rtt_us, .. }) = way else { return WayClass::Unknown };
        match (state, loss, rtt_us) {
            (PeerState::Unreachable, ..) => WayClass::Broken,
            (PeerState::Programmed, Some(1..), _) => WayClass::Lossy,
            (PeerState::Programmed, _, None) => WayClass::Unasked,
            (PeerState::Programmed, _, Some(0..500)) => WayClass::Fastest,
            (PeerState::Programmed, _, Some(500..2000)) => WayClass::Fast,
            (PeerState::Programmed, _, Some(2000..10_000)) => WayClass::Slow,
            (PeerState::Programmed, ..) => WayClass::Slowest,
            _ => WayClass::Unwritten,
        }
    }

    fn look(self) -> Look {
        LOOKS[self as usize]
    }
}

/// Returns the picture.
pub fn render(cluster: &Cluster) -> String {
    let count = cluster.nodes.len();
    let cell = (WIDTH / count.max(1)).clamp(CELL.0, CELL.1);
    let labels: Vec<String> = (0..).take(count).map(|place| cluster.label(place)).collect();
    let is_labelled = cell >= MIN_LABELLED;
    let widest = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0).min(48);
    let (left, top) = if is_labelled { (MARGIN + (widest + 1) * CHARACTER, HEADING + 32) } else { (MARGIN, HEADING) };
    let side = count * cell;
    let (width, height) = ((left + side).max(MIN_WIDTH) + MARGIN, top + side + LEGEND);
    let mut out = head(cluster, width, height);
    if is_labelled {
        for (place, label) in labels.iter().enumerate() {
            let (x, y) = (left + place * cell + cell / 2, top + place * cell + cell / 2 + 4);
            let short: String = label.chars().take(48).collect();
            let _ =
                writeln!(out, "<text x='{}' y='{y}' text-anchor='end'>{}</text>", left - CHARACTER, escaped(&short));
            let _ = writeln!(out, "<text x='{x}' y='{}' text-anchor='middle'>{}</text>", top - 6, place + 1);
        }
    }
    let _ = writeln!(out, "<g transform='translate({left} {top}) scale({cell})'>");
    for (from, node) in (0_u32..).zip(&cluster.nodes) {
        if count <= MAX_TITLES {
            titled_row(&mut out, cluster, (from, node), &labels);
        } else {
            row(&mut out, (from, node), count);
        }
    }
    out.push_str("</g>\n");
    legend(&mut out, top + side + 24);
    out.push_str("</svg>\n");
    out
}

fn head(cluster: &Cluster, width: usize, height: usize) -> String {
    let mut out = format!(
        "<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}' role='img'>\n"
    );
    out.push_str("<style>\ntext{font:12px ui-monospace,monospace;fill:#222}.h{font-size:16px}.bg{fill:#fff}\n");
    out.extend(LOOKS.iter().map(|Look { name, light, .. }| format!(".{name}{{fill:{light}}}")));
    out.push_str("\n@media(prefers-color-scheme:dark){text{fill:#ddd}.bg{fill:#14171a}");
    out.extend(LOOKS.iter().map(|Look { name, dark, .. }| format!(".{name}{{fill:{dark}}}")));
    out.push_str("}\n</style>\n<rect class='bg' width='100%' height='100%'/>\n");
    let answered = cluster.nodes.iter().filter(|node| node.error.is_none()).count();
    let ways =
        |state| cluster.nodes.iter().flat_map(|node| node.ways.values()).filter(|way| way.state == state).count();
    let _ = writeln!(
        out,
        "<text class='h' x='{MARGIN}' y='28'>{} nodes, {answered} answered, {} broken ways; a row sends, a column receives</text>",
        cluster.nodes.len(),
        ways(PeerState::Unreachable)
    );
    out
}

/// Writes the cells of a node. Neighbours of the same class are one rectangle.
fn row(out: &mut String, (from, node): (u32, &ClusterNode), count: usize) {
    let classes: Vec<Option<WayClass>> =
        (0..).take(count).map(|to| (to != from).then(|| WayClass::of(node.ways.get(&to)))).collect();
    let mut begin = 0;
    for same in classes.chunk_by(|a, b| a == b) {
        if let Some(Some(class)) = same.first() {
            let _ = writeln!(
                out,
                "<rect class='{}' x='{begin}' y='{from}' width='{}' height='1'/>",
                class.look().name,
                same.len()
            );
        }
        begin += same.len();
    }
}

/// Writes the cells of a node, each with a text for the pointer.
fn titled_row(out: &mut String, cluster: &Cluster, (from, node): (u32, &ClusterNode), labels: &[String]) {
    for (to, label) in (0_u32..).zip(labels).filter(|(to, _)| *to != from) {
        let way = node.ways.get(&to);
        let Look { name, meaning, .. } = WayClass::of(way).look();
        let mut title = format!("{} to {label}: {meaning}", cluster.label(from));
        if let Some(way) = way {
            let _ = write!(title, "; {}", way.describe());
        }
        let reason = node.reasons.get(&to).or(node.error.as_ref());
        title.extend(reason.into_iter().flat_map(|reason| ["; ", reason]));
        let title = escaped(&title);
        let _ = writeln!(
            out,
            "<rect class='{name}' x='{to}.04' y='{from}.04' width='.92' height='.92'><title>{title}</title></rect>"
        );
    }
}

fn legend(out: &mut String, y: usize) {
    let mut x = MARGIN;
    for Look { name, meaning, .. } in LOOKS {
        let _ = writeln!(out, "<rect class='{name}' x='{x}' y='{}' width='10' height='10'/>", y - 9);
        let _ = writeln!(out, "<text x='{}' y='{y}' style='font-size:10px'>{meaning}</text>", x + 13);
        x += 20 + meaning.len() * 6;
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::mesh::cluster::KnownNode;
    use crate::observe::mesh::row::{Row, RowWay};

    fn cluster(count: u16, name: &str) -> Cluster {
        let subnet = |number: u16| format!("10.{}.{}.0/24", number / 250, number % 250);
        let known = |number| KnownNode { subnet: subnet(number), public: "192.168.0.1".into() };
        let mut cluster = Cluster::new((0..count).map(known).collect());
        let way = |to| {
            let state = if to == 1 { PeerState::Unreachable } else { PeerState::Programmed };
            RowWay {
                to: subnet(to),
                state,
                loss: Some(0),
                rtt_us: Some(300),
                mtu: Some(1450),
                reason: Some("a < b".into()),
            }
        };
        let row = |number: u16| {
            let ways = (0..count).filter(|to| *to != number).map(way).collect();
            (subnet(number), Ok(Row { node: name.to_owned(), subnet: subnet(number), ways, ..Row::default() }))
        };
        cluster.answered((0..count - 1).map(row).collect());
        cluster
    }

    #[test]
    fn the_class_of_a_way_is_its_state_then_its_loss_then_its_round_trip() {
        use PeerState::{Failed, Held, Pending, Programmed, Unreachable};
        let way = |state, loss, rtt_us| Some(Quality { state, loss, rtt_us, mtu: None });
        let trip = |rtt_us| way(Programmed, Some(0), Some(rtt_us));
        for (way, meaning) in [
            (None, "unknown"),
            (way(Unreachable, Some(100), None), "broken"),
            (way(Programmed, Some(1), Some(300)), "loses packets"),
            (way(Pending, Some(0), Some(300)), "not in the kernel"),
            (way(Failed, None, None), "not in the kernel"),
            (way(Held, None, None), "not in the kernel"),
            (way(Programmed, None, None), "not asked yet"),
            (way(Programmed, None, Some(300)), "below 0.5 ms"),
            (trip(499), "below 0.5 ms"),
            (trip(500), "below 2 ms"),
            (trip(1_999), "below 2 ms"),
            (trip(2_000), "below 10 ms"),
            (trip(9_999), "below 10 ms"),
            (trip(10_000), "10 ms and more"),
        ] {
            assert_eq!(WayClass::of(way.as_ref()).look().meaning, meaning, "{way:?}");
        }
        assert!(LOOKS.iter().all(|look| look.class.look().class == look.class));
    }

    #[test]
    fn names_are_text_and_each_cell_has_a_title() {
        let svg = render(&cluster(4, "<script>alert('&')</script>"));
        assert!(!svg.contains("<script") && svg.contains("&lt;script&gt;alert('&amp;')"), "{svg}");
        assert_eq!(svg.matches("<title>").count(), 12);
        assert_eq!(
            svg.matches("<rect class='x' x='1.04'").count(),
            2,
            "three nodes answered, and one is the node itself"
        );
        assert_eq!(svg.matches("<rect class='u'").count(), 3 + 1, "the row of the node that is silent, and the legend");
        assert!(svg.contains("10.0.1.0/24: broken; unreachable, loss 0 %, 0.30 ms, MTU 1450; a &lt; b"), "{svg}");
    }

    /// Who sends stands at the left, as in the table.
    #[test]
    fn in_a_large_cluster_a_row_sends_and_a_column_receives() {
        let svg = render(&cluster(60, "n"));
        for (class, x, y, width) in [("x", 1, 0, 1), ("a", 2, 5, 3), ("a", 6, 5, 54), ("a", 0, 1, 1), ("u", 0, 59, 59)]
        {
            let cells = format!("<rect class='{class}' x='{x}' y='{y}' width='{width}' height='1'/>");
            assert!(svg.contains(&cells), "{cells} is missing in\n{svg}");
        }
        assert!(!svg.contains("<title>"), "the texts of so many cells would be a large file");
    }

    #[test]
    fn a_large_cluster_is_a_small_file() {
        let svg = render(&cluster(1000, "n"));
        assert!(svg.len() < 1_000_000, "{} bytes", svg.len());
        assert!(svg.contains("1000 nodes, 999 answered, 998 broken ways"));
        assert!(render(&Cluster::default()).ends_with("</svg>\n"));
    }
}
