// SPDX-License-Identifier: Apache-2.0
//! Writes the manual pages and the completions of shells from the flags of weft: `weft-manual DIRECTORY`. It is a program of its own, so
//! that the agent does not carry what only a package needs.

#![allow(clippy::print_stderr, reason = "a tool of the build says why it failed")]

mod sections;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;

/// The section of the manual for the administration of a system.
const SECTION: &str = "8";

fn main() -> ExitCode {
    let Some(dir) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: weft-manual DIRECTORY");
        return ExitCode::from(2);
    };
    let done = write(&dir);
    done.map_or_else(
        |error| {
            eprintln!("weft-manual: write into {}: {error}", dir.display());
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}

/// Writes `man/*.8`, and the completions under the names by which shells look for them.
fn write(dir: &Path) -> io::Result<()> {
    let (pages, completions) = (dir.join("man"), dir.join("completions"));
    fs::create_dir_all(&pages)?;
    fs::create_dir_all(&completions)?;
    let weft = visible(weft::cli::command().disable_help_subcommand(true));
    page(&weft, "weft", &pages)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut weft.clone(), "weft", &completions)?;
    }
    Ok(())
}

/// Returns the command without the sub-commands that people do not call.
fn visible(command: Command) -> Command {
    let shown: Vec<Command> =
        command.get_subcommands().filter(|below| !below.is_hide_set()).cloned().map(visible).collect();
    let mut bare = Command::new(leaked(command.get_name())).disable_version_flag(true).disable_help_subcommand(true);
    if let Some(about) = command.get_about() {
        bare = bare.about(about.clone());
    }
    if let Some(about) = command.get_long_about() {
        bare = bare.long_about(about.clone());
    }
    bare.args(command.get_arguments().filter(|arg| !arg.is_hide_set())).subcommands(shown)
}

/// Returns a name in the form that clap takes. It is not freed, which does not matter in a program that ends soon.
fn leaked(name: &str) -> &'static str {
    name.to_owned().leak()
}

/// Writes the page of a command and those of its sub-commands. `call` is how it is called, such as `weft lease ls`, whose page is
/// `weft-lease-ls.8`.
fn page(command: &Command, call: &str, dir: &Path) -> io::Result<()> {
    let name = call.replace(' ', "-");
    let titled = command.clone().name(leaked(&name)).bin_name(call);
    let man = Man::new(titled).section(SECTION).manual("weft").source(concat!("weft ", env!("CARGO_PKG_VERSION")));
    let mut text = Vec::new();
    man.render(&mut text)?;
    text.extend(sections::of(command, call).into_bytes());
    fs::write(dir.join(format!("{name}.{SECTION}")), text)?;
    command.get_subcommands().try_for_each(|below| page(below, &format!("{call} {}", below.get_name()), dir))
}
