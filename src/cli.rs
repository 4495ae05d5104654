// SPDX-License-Identifier: Apache-2.0
//! Reads the command line and the environment, and turns them into plain values. No other module reads settings of weft from the environment.
//!
//! Exit codes are 0 for success, 1 for a failure and 2 for bad usage. A renew margin out of range is 1, as in flannel.

mod argv;
mod build;
pub mod cleanup;
pub mod doctor;
pub mod drop_in;
pub mod duration;
pub mod exit;
pub mod explain;
pub mod flags;
pub mod questions;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::log::Format;
use crate::options::{Options, Store};
use argv::Flags;
use cleanup::{CleanupFlags, CleanupTask};
use drop_in::{Copy, DockerOptions, InstallConf};
use exit::{FAILURE, USAGE};
use flags::{AgentFlags, InstallFlags, InstanceFlags, PlaceFlags, StoreFlags};

/// How flags are read from the environment, for the help and for manual pages.
pub const ENVIRONMENT: &str = "A flag that is not on the command line is read from the environment. The variable is FLANNELD_\n\
     and the name of the flag in capitals, with _ for -: --subnet-file is FLANNELD_SUBNET_FILE. An\n\
     empty variable counts as not set.";

/// The process ends without a task: what it prints, and its exit code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exit {
    /// Exit code.
    pub code: u8,
    /// What to print.
    pub text: String,
    /// True for help that the user asked for. It goes to stdout, without `weft: ` before it.
    pub help: bool,
}

impl Exit {
    fn new(code: u8, text: String) -> Exit {
        Exit { code, text, help: false }
    }
}

/// What the process does.
#[derive(Debug)]
pub enum Task {
    /// Run the agent.
    Agent(Box<AgentTask>),
    /// Ask the agent.
    Status(questions::StatusTask),
    /// Ask the agent what its next full pass would write.
    Plan(questions::PlanTask),
    /// Ask the agent behind this socket to change the key of its node.
    RotateKey(PathBuf),
    /// Ask the agent what it changed in the kernel.
    History(questions::HistoryTask),
    /// Ask the agent, or all of them, which peers packets reach.
    Mesh(questions::MeshTask),
    /// Explain what this node does with a packet.
    Explain(Box<explain::ExplainTask>),
    /// Serve a page for browsers of this host.
    Ui(questions::UiTask),
    /// Remove the entries of an agent from the kernel.
    Cleanup(CleanupTask),
    /// Install the CNI plugin into a directory.
    InstallCni(InstallFlags),
    /// Give the own lease back.
    Release(ReleaseTask),
    /// List leases.
    LeaseList(Store),
    /// Remove one lease.
    LeaseRemove(Store, String),
    /// Print the version.
    Version(VersionForm),
    /// Copy a file, as the init containers of flannel do.
    Copy(InstallConf),
    /// Write the options for Docker.
    DockerOptions(DockerOptions),
    /// `weft lab`.
    Lab(weft_lab::LabArgs),
    /// `weft doctor pods`: the files that it reads, and whether it removes what is certainly left behind.
    DoctorPods(weft_doctor::pods::Sources, bool),
    /// `weft doctor`.
    Doctor(Box<doctor::DoctorTask>),
    /// `weft doctor list`.
    DoctorList,
}

/// How the version is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VersionForm {
    /// The number alone, to stdout: `weft version`.
    Text,
    /// The number alone, to stderr: `--version`, as flannel has it.
    Stderr,
    /// A JSON object: `weft version --json`.
    Json,
}

/// `weft agent`.
#[derive(Debug)]
pub struct AgentTask {
    /// The options of the agent.
    pub options: Options,
    /// `-v`.
    pub verbosity: u8,
    /// `--log-format`.
    pub log_format: Format,
    /// Lines to be logged at the start.
    pub notes: Vec<String>,
}

/// `weft release`.
#[derive(Debug)]
pub struct ReleaseTask {
    /// The directory of the saved peers, which contain the lease that is given back.
    pub state_dir: PathBuf,
    /// The store that contains the lease.
    pub store: Store,
    /// The subnet file, which says what the own subnet is.
    pub subnet_file: PathBuf,
    /// The socket on which an agent would answer. A running agent would take the lease again.
    pub socket: PathBuf,
    /// `--public-ip` and `--public-ipv6`: published addresses that are on no interface.
    pub public: Vec<std::net::IpAddr>,
}

/// Gives every node its pod subnet and makes all subnets reach each other.
#[derive(Parser)]
#[command(name = "weft", disable_version_flag = true, subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the per-node agent (also when called by the name flanneld).
    #[command(args_override_self = true, after_help = ENVIRONMENT)]
    Agent(Box<AgentFlags>),
    /// Show the state of an agent of this machine.
    Status(questions::StatusFlags),
    /// Show what the agent's next full pass would write, without writing it; the exit code is 2 if there is anything.
    Plan(questions::PlanFlags),
    /// Show what the agent changed in the kernel, when and why; also what it did before its last restart. JSON has one record a line.
    History(questions::HistoryFlags),
    /// Show which peers packets reach, from this node or between all nodes, with loss, round trip and path MTU, the worst first; the exit
    /// code is 2 if a way is broken.
    Mesh(questions::MeshFlags),
    /// Show the mesh, the leases, the nodes and the history as a page for a browser of this host; it only reads.
    Ui(questions::UiFlags),
    /// Give this node a new key, without losing packets (only with the backend wireguard).
    RotateKey(InstanceFlags),
    /// Remove what an agent wrote into the kernel; refuses while it runs.
    Cleanup(CleanupFlags),
    /// Install the CNI plugin from this image; a running plugin is not disturbed.
    InstallCni(InstallFlags),
    /// Give this machine's lease back, for a machine that leaves for good.
    Release(Box<ReleaseFlags>),
    /// List leases, or remove one.
    #[command(subcommand)]
    Lease(LeaseCommand),
    /// Find what is wrong with this machine, with or without an agent; or what pods left behind on it.
    Doctor(Box<doctor::DoctorFlags>),
    /// Explain step by step what this machine does with packets from one address to another; the exit code is 2 if they are lost here.
    Explain(Box<explain::ExplainFlags>),
    /// Copy a CNI configuration to its place (also when called by the name install-conf).
    InstallConf(InstallConf),
    /// Write the options for Docker that belong to the node's subnet (also when called by the name mk-docker-opts.sh).
    #[command(name = "docker-opts", args_override_self = true)]
    DockerOptions(DockerOptions),
    /// Copy a file, when called by the name cp.
    #[command(name = "cp", hide = true)]
    Copy(Copy),
    /// Run a whole cluster in network namespaces on this machine, break it and watch it heal.
    Lab(weft_lab::LabArgs),
    /// Print the version.
    Version(VersionFlags),
}

#[derive(Args)]
struct VersionFlags {
    /// Print a JSON object that also says what this build contains.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct ReleaseFlags {
    #[command(flatten)]
    store: StoreFlags,
    #[command(flatten)]
    place: PlaceFlags,
    /// Published IPv4 address, if it is on no interface.
    #[arg(long, value_name = "IP")]
    public_ip: Option<std::net::Ipv4Addr>,
    /// Published IPv6 address, if it is on no interface.
    #[arg(long, value_name = "IP")]
    public_ipv6: Option<std::net::Ipv6Addr>,
}

#[derive(Subcommand)]
enum LeaseCommand {
    /// List every lease in the store, unreadable ones included.
    Ls(Box<StoreFlags>),
    /// Remove one lease by the name that `weft lease ls` shows.
    Rm(Box<RemoveFlags>),
}

#[derive(Args)]
struct RemoveFlags {
    /// Name of the lease, such as 10.5.52.0-24.
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    store: StoreFlags,
}

/// Returns every command and flag with its description. A test compares the documentation with it.
pub fn command() -> clap::Command {
    Cli::command()
}

/// Reads the command line and the environment of this process.
///
/// # Errors
/// The process must end: with help, or because the command line is wrong.
pub fn parse() -> Result<Task, Exit> {
    #[allow(clippy::disallowed_methods, reason = "only this function reads settings from the environment")]
    let env = |name: &str| std::env::var(name).ok();
    parse_from(std::env::args_os(), env)
}

/// Returns the environment of this process. Variables that are not UTF-8 are left out.
pub fn environment() -> BTreeMap<String, String> {
    std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

/// As [`parse`], with the given command line and environment.
///
/// # Errors
/// See [`parse`].
pub fn parse_from(
    args: impl IntoIterator<Item = OsString>,
    env: impl Fn(&str) -> Option<String>,
) -> Result<Task, Exit> {
    let unreadable = |arg: OsString| Exit::new(USAGE, format!("argument {arg:?} is not UTF-8"));
    let mut words = args.into_iter().map(OsString::into_string).collect::<Result<Vec<_>, _>>().map_err(unreadable)?;
    let called = words.first().and_then(|arg| Path::new(arg).file_name()).and_then(|name| name.to_str());
    let called = called.map(str::to_owned);
    let drop_in = called.as_deref().and_then(drop_in::command);
    if let Some(command) = drop_in {
        words.insert(1, command.to_owned());
    }
    if words.len() == 2 && ["--version", "-version", "-V"].contains(&words[1].as_str()) {
        return Ok(Task::Version(VersionForm::Stderr));
    }
    let (depth, flags) = leaf(&words);
    let mut all = words[..depth].to_vec();
    all.extend(argv::normalize(&words[depth..], &flags));
    let asks = all.iter().any(|word| word == "-h" || word == "--help");
    let from_env = if asks { Vec::new() } else { argv::add_env(&mut all, &flags, &env) };
    let matches =
        Cli::command().try_get_matches_from(all).map_err(|error| match (drop_in, from_clap(&error, &from_env)) {
            // Scripts that call flannel's script know its exit code.
            (Some("docker-opts"), exit) => Exit { code: FAILURE, help: false, ..exit },
            (_, exit) => exit,
        })?;
    let mut cli = Cli::from_arg_matches(&matches).map_err(|error| from_clap(&error, &from_env))?;
    if let (Some("flanneld"), Command::Agent(flags)) = (called.as_deref(), &mut cli.command) {
        // A drop-in replacement must not add rules that flanneld would not add.
        flags.rules.fence.fail_closed.get_or_insert(false);
    }
    task(cli.command, &env).map_err(|mut exit| {
        exit.text.push_str(&origin(&exit.text, &from_env));
        exit
    })
}

fn task(command: Command, env: build::Env) -> Result<Task, Exit> {
    Ok(match command {
        Command::Agent(flags) if flags.log.version => Task::Version(VersionForm::Stderr),
        Command::Agent(flags) => {
            let (verbosity, log_format) = (flags.log.v, flags.log.log_format);
            let (options, notes) = build::agent(*flags, env)?;
            Task::Agent(Box::new(AgentTask { options, verbosity, log_format, notes }))
        }
        Command::Status(flags) => Task::Status(flags.into()),
        Command::Plan(flags) => Task::Plan(flags.into()),
        Command::RotateKey(flags) => Task::RotateKey(flags.socket()),
        Command::History(flags) => Task::History(flags.into()),
        Command::Mesh(flags) => Task::Mesh(flags.into()),
        Command::Ui(flags) => Task::Ui(flags.into()),
        Command::Cleanup(flags) => Task::Cleanup(flags.into()),
        Command::InstallCni(flags) => Task::InstallCni(flags),
        Command::Release(flags) => Task::Release(ReleaseTask {
            state_dir: PathBuf::from(flags.place.state_dir),
            store: build::store(flags.store, env)?,
            socket: flags.place.instance.socket(),
            subnet_file: flags.place.instance.subnet_file,
            public: flags.public_ip.map(Into::into).into_iter().chain(flags.public_ipv6.map(Into::into)).collect(),
        }),
        Command::Lease(LeaseCommand::Ls(store)) => Task::LeaseList(build::store(*store, env)?),
        Command::Lease(LeaseCommand::Rm(flags)) => Task::LeaseRemove(build::store(flags.store, env)?, flags.id),
        Command::Doctor(flags) => flags.task(env)?,
        Command::Explain(flags) => Task::Explain(Box::new(flags.task()?)),
        Command::InstallConf(files) | Command::Copy(Copy { files, .. }) => Task::Copy(files),
        Command::DockerOptions(options) => Task::DockerOptions(options),
        Command::Lab(args) => Task::Lab(args),
        Command::Version(flags) => Task::Version(if flags.json { VersionForm::Json } else { VersionForm::Text }),
    })
}

/// The commands that have no flags in Go's form and none from the environment, except those of the store for `weft doctor --check-store`.
const PLAIN: [&str; 5] = ["lab", "doctor", "cp", "install-conf", "docker-opts"];

/// Returns true if a command, such as `weft lease ls`, reads flags from the environment.
pub fn reads_environment(call: &str) -> bool {
    !call.split(' ').any(|word| PLAIN.contains(&word))
}

/// Returns how many words stay as they are, and the flags that the other words may have in Go's form and that the environment may set.
fn leaf(words: &[String]) -> (usize, Flags) {
    let mut command = Cli::command();
    let mut depth = words.len().min(1);
    while let Some(next) = words.get(depth).and_then(|word| command.find_subcommand(word)) {
        if PLAIN.contains(&next.get_name()) {
            let asks_store = next.get_name() == "doctor" && words.iter().any(|word| word == "--check-store");
            // A wrong variable must not end a doctor that asks no store. None may set --fix of `weft doctor pods`, which removes files.
            let store = || flags_of(&StoreFlags::augment_args(clap::Command::new("store")));
            return (words.len(), if asks_store { store() } else { Flags::new() });
        }
        command = next.clone();
        depth += 1;
    }
    if command.has_subcommands() {
        return (words.len(), Flags::new());
    }
    (depth, flags_of(&command))
}

/// Returns the flags of a command that the environment may set.
fn flags_of(command: &clap::Command) -> Flags {
    let flag = |arg: &clap::Arg| {
        let name = arg.get_long()?.to_owned();
        // A flag without a value must be on the command line. So no variable sets --flannel-devices, which lets `weft cleanup` remove what
        // another program made, and FLANNELD_PROBE, which is for the agent, does not end `weft explain`, which has another flag of this name.
        arg.get_action().takes_values().then_some((name, !arg.is_require_equals_set()))
    };
    command.get_arguments().filter_map(flag).collect()
}

fn from_clap(error: &clap::Error, from_env: &[(String, String)]) -> Exit {
    let help = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    let mut text = error.render().to_string();
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        text.insert_str(0, "a command is missing\n\n");
    }
    text.push_str(&origin(&text, from_env));
    let code = if help { 0 } else { USAGE };
    Exit { code, help, text: text.trim_start_matches("error: ").trim_end().to_owned() }
}

/// Returns notes that say which of the flags named in an error came from the environment.
fn origin(text: &str, from_env: &[(String, String)]) -> String {
    let named = from_env.iter().filter(|(flag, _)| text.contains(&format!("--{flag}")));
    named.map(|(flag, variable)| format!("\nnote: --{flag} was set by the environment variable {variable}")).collect()
}

#[cfg(test)]
mod tests;
