// SPDX-License-Identifier: Apache-2.0
//! What to do about the commonest problems that an agent reports.

use std::net::IpAddr;

use super::node_findings::{NodeFinding, finding};

/// The problems of these kinds end with a command. Others may contain what another node says of itself, so no command is taken from them.
const WITH_COMMAND: [&str; 5] = ["uplink: ", "sysctl ", "chain ", "br_netfilter ", "--tx-checksum-off: "];
/// What comes before the command.
const RUN: &str = "; run: ";
/// The programs that undo again and again what the agent writes.
const FIND: &str = "find the program that does it: cron, networkd, NetworkManager, a VPN, a firewall, a second agent";

/// Returns the finding about one problem.
pub(super) fn reported(problem: &str) -> NodeFinding {
    let usual = || "look for this text in docs/messages.md; `weft status` shows the whole state".to_owned();
    finding(format!("the agent reports: {problem}"), remedy(problem).unwrap_or_else(usual))
}

/// Returns what to do about an agent that does not answer, if its process is stopped. The rest of the text may be what somebody else says, so only
/// the number is taken from it.
pub(super) fn of_stopped_agent(why: &str) -> Option<String> {
    let (_, pid) = why.split_once("its process is stopped; run: kill -CONT ")?;
    let pid: u32 = pid.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()?;
    Some(format!(
        "kill -CONT {pid}; then find out who stopped it (SIGSTOP, a debugger); pods keep their network meanwhile"
    ))
}

fn remedy(problem: &str) -> Option<String> {
    if WITH_COMMAND.iter().any(|kind| problem.starts_with(kind)) {
        return problem.split_once(RUN).map(|(_, command)| command.to_owned());
    }
    if problem.starts_with("another program repeatedly deletes or replaces ") {
        let monitor = "`ip monitor link address route neigh` (or `bridge monitor fdb`)";
        return Some(format!("{monitor} shows when; {FIND}"));
    }
    if problem.starts_with("another program changes the traffic rules all the time") {
        return Some(format!("`nft monitor` shows when, or a watch of `iptables-legacy-save`; {FIND}"));
    }
    if problem.starts_with("store: ") {
        return Some("weft doctor --check-store, with the agent's flags of the store, finds out why".to_owned());
    }
    if problem.starts_with("packets do not reach ") {
        return Some("weft mesh shows which ways are broken, and why".to_owned());
    }
    let (_, reason) = problem.strip_prefix("peer ")?.split_once(" is unreachable: ")?;
    silent(reason).or_else(|| firewall(reason)).or_else(|| mtu(reason))
}

/// The public address of the peer does not answer.
fn silent(reason: &str) -> Option<String> {
    let (words, _) = reason.split_once(": the node is down or cut off")?;
    let (_, rest) = words.split_once("its public address ")?;
    let address: IpAddr = rest.split(' ').next()?.parse().ok()?;
    Some(format!(
        "ping -c 3 {address}; if that node is up: weft status and weft doctor there, and compare its addresses with {address}"
    ))
}

/// A firewall drops packets of the tunnel.
fn firewall(reason: &str) -> Option<String> {
    let (_, dropped) = reason.split_once(" drops ")?;
    let dropped = dropped.split(" from this node").next().unwrap_or(dropped);
    Some(format!(
        "weft doctor --only firewall on both nodes names the rule; if there is none, let {dropped} pass between the nodes (security group, switch)"
    ))
}

/// A link on the path carries smaller packets.
fn mtu(reason: &str) -> Option<String> {
    let (_, rest) = reason.split_once("or set the MTU of the uplink ")?;
    let (link, rest) = rest.split_once(" to ")?;
    let mtu: u32 = rest.split(' ').next()?.parse().ok()?;
    Some(format!("ip link set {link} mtu {mtu} on every node; or raise the MTU of the link between them"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commonest_problems_have_a_command() {
        let peer = "peer 10.5.2.0/24 (192.0.2.2) is unreachable: ";
        for (problem, begin) in [
            ("uplink: eth0 is down; run: ip link set eth0 up".to_owned(), "ip link set eth0 up"),
            ("sysctl a.b: Permission denied; run: sysctl -w a.b=1".to_owned(), "sysctl -w a.b=1"),
            (
                "chain FORWARD of iptables-legacy drops forwarded packets of pods; with --firewall=iptables, the agent accepts them \
                 itself; run: iptables-legacy -I FORWARD -s 10.5.0.0/16 -j ACCEPT"
                    .to_owned(),
                "iptables-legacy -I FORWARD -s 10.5.0.0/16 -j ACCEPT",
            ),
            (
                "another program repeatedly deletes or replaces route 10.5.2.0/24 and 3 more (protocol 4, static)".to_owned(),
                "`ip monitor link address route neigh` (or `bridge monitor fdb`) shows when; find the program",
            ),
            (
                "another program changes the traffic rules all the time: a resync restores them".to_owned(),
                "`nft monitor` shows when",
            ),
            ("store: no answer; its last answer was 7 s ago".to_owned(), "weft doctor --check-store"),
            ("packets do not reach 1 of 3 peers: 10.5.2.0/24 (192.0.2.2); weft mesh has".to_owned(), "weft mesh"),
            (
                format!("{peer}its public address 192.0.2.2 does not answer: the node is down or cut off, or"),
                "ping -c 3 192.0.2.2;",
            ),
            (
                format!(
                    "{peer}neither its tunnel address 10.5.2.0 nor its public address 192.0.2.2 answers: the node is down or cut off, or"
                ),
                "ping -c 3 192.0.2.2;",
            ),
            (
                format!("{peer}a firewall between the nodes, or on one of them, drops UDP port 8472"),
                "weft doctor --only firewall",
            ),
            (
                format!("{peer}Raise its MTU, or set the MTU of the uplink eth0 to 1404 on every node"),
                "ip link set eth0 mtu 1404 ",
            ),
        ] {
            let finding = reported(&problem);
            assert!(finding.remedy.starts_with(begin), "{problem}: {}", finding.remedy);
            assert_eq!(finding.evidence, format!("the agent reports: {problem}"));
        }
        let dropped = reported(&format!(
            "{peer}it does not answer ours: a firewall drops UDP port 8472 from this node to 192.0.2.2"
        ));
        assert!(dropped.remedy.contains("let UDP port 8472 pass between"), "{}", dropped.remedy);
    }

    #[test]
    fn no_command_is_taken_from_what_another_node_may_say() {
        for problem in [
            "peer 10.5.2.0/24 (192.0.2.2) is set aside: its node is x; run: rm /file",
            "peer 10.5.2.0/24 (192.0.2.2) is unreachable: its public address x;rm does not answer: the node is down or cut off",
            "no lease",
        ] {
            assert!(reported(problem).remedy.starts_with("look for this text"), "{problem}");
        }
    }
}
